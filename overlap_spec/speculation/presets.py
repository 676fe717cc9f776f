"""Policies by name, the published JSON config files, and policies of a user's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from overlap_spec.config import EngineConfig, own_class
from overlap_spec.errors import ConfigError
from overlap_spec.speculation.policy import LengthPolicy, StaticPolicy, static_tier
from overlap_spec.speculation.tiers import EmaSlot, SlotPolicy, SlotSettings
from overlap_spec.tiers import OFF, Tier

PRESETS: dict[str, dict[int, SlotSettings]] = {
    "default": {
        1: SlotSettings((1, 3, 7)),
        8: SlotSettings((1, 3), down_hysteresis=0.0),
        32: SlotSettings((1,)),
    },
    "aggressive": {
        1: SlotSettings((1, 3, 7)),
        8: SlotSettings((1, 3, 7), ceiling_coeff=3.0),
        64: SlotSettings((1, 3), ceiling_coeff=1.67),
        128: SlotSettings((1, 3), ceiling_coeff=1.2),
    },
    "with_off": {
        1: SlotSettings((1, 3, 5, 7)),
        8: SlotSettings((0, 1, 3), down_hysteresis=0.0),
        32: SlotSettings((0, 1), down_hysteresis=0.0),
        64: SlotSettings((0,), down_hysteresis=0.0),
    },
}
POLICY_NAMES = ("auto", "adaspec", "adaspec_minus", "static", "off", *PRESETS)
# Policies of ours that have a file of their own, as those of users are named.
ADASPEC = "overlap_spec.speculation.adaspec:AdaSpecPolicy"
AUTO = "overlap_spec.speculation.auto:AutoPolicy"
# Depths of chains that adaspec chooses from, and auto; auto's trees.
CHAINS = (0, 1, 2, 3, 4, 5, 6, 7)
AUTO_CHAINS = (0, 1, 2, 3, 5, 7)
AUTO_TREES = (Tier(3, 4, 16), Tier(5, 4, 16))
_own: Callable[[str], Callable[..., LengthPolicy]] = partial(
    own_class, kind=LengthPolicy, setting="adaptive policy"
)


def load_policy(
    name_or_path: str, steps: int, top_k: int, nodes: int | None, trees: bool = True
) -> LengthPolicy:
    """The policy of a name, of a class or of a JSON file.

    Args:
        name_or_path: One of :data:`POLICY_NAMES` (hyphen and underscore are the same, case does
            not matter); ``package.module:Class``, a :class:`LengthPolicy` of the user's own that
            is called with the launch tier; or a file's path, as ``./default``.
        steps: Of the static tier, and where adaptive slots begin.
        top_k: Branches of a draft step; 1 is a chain.
        nodes: Of the static tier, root included, and the most of any tree; None as in
            ``static_tier``. Chains of adaptive tiers verify all they draft.
        trees: Whether the drafter is known to draft trees, whatever ``top_k`` is.

    Raises:
        ConfigError: No such policy, class or file, or a broken file; names the key at fault.
    """
    name = name_or_path.lower().replace("-", "_")
    launch = static_tier(steps, top_k, nodes)
    if name == "static":
        return StaticPolicy(launch)
    if name == "off":
        return StaticPolicy(OFF, name)
    if name in ("adaspec", "adaspec_minus"):
        chains = [static_tier(depth, 1, None) for depth in CHAINS]
        return _own(ADASPEC)(chains, verifier=name == "adaspec")
    if name == "auto":
        chains = [static_tier(depth, 1, None) for depth in AUTO_CHAINS]
        tiers = dict.fromkeys((*chains, *(AUTO_TREES if trees else ()), launch))
        return _own(AUTO)(tuple(tiers), launch)
    if re.fullmatch(r"[\w.]+:\w+", name_or_path):
        return _own(name_or_path)(launch)
    if top_k == 1 and nodes not in (None, steps + 1):
        raise ConfigError(
            f"num_draft_tokens: the chains of {name_or_path!r} verify all that they draft; leave "
            f"it out: {nodes}"
        )
    tier_of = partial(static_tier, top_k=top_k, nodes=None if top_k == 1 else nodes)
    settings = PRESETS[name] if name in PRESETS else read_config(name_or_path)
    slots = {bound: EmaSlot(slot, steps) for bound, slot in settings.items()}
    return SlotPolicy(name if name in PRESETS else name_or_path, slots, tier_of)


def read_config(path: str) -> dict[int, SlotSettings]:
    """Slots of a JSON file in the published shape: least batch size → settings.

    An object with one key for each slot (a batch size, as a string), holding an object with its
    ``candidate_steps`` (required) and hysteresis and ceiling; beside the slots ``ema_alpha``,
    ``update_interval`` and ``warmup_batches``. As in the published loader, any setting but
    ``candidate_steps`` may stand in either place, and a slot's own wins. ConfigError names the file
    and the key at fault.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        known = ", ".join((*POLICY_NAMES, "package.module:Class")).replace("_", "-")
        raise ConfigError(
            f"adaptive policy {path!r} is neither a name ({known}) nor a readable file: {error}"
        ) from error
    try:
        data = json.loads(text, object_pairs_hook=_object)
        return _slots(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"adaptive config {path!r}: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"key {key!r} stands twice")
    return dict(pairs)


def _slots(data: object) -> dict[int, SlotSettings]:
    if not isinstance(data, dict):
        raise ConfigError(f"must be an object, not {type(data).__name__}")
    bounds = [key for key in data if re.fullmatch(r"[0-9]+", key)]
    for key in bounds:
        if not re.fullmatch(r"[1-9][0-9]{0,8}", key):
            raise ConfigError(f'slot {key!r} must be a batch size, 1 or more, as in "8"')
    shared = {key: value for key, value in data.items() if key not in bounds}
    if "candidate_steps" in shared:
        raise ConfigError('candidate_steps belongs in a slot: {"1": {"candidate_steps": [1, 3]}}')
    _check_keys(shared, "")
    if not bounds:
        raise ConfigError('has no slot; add one, as in {"1": {"candidate_steps": [1, 3, 7]}}')
    slots = {}
    for key in bounds:
        if not isinstance(data[key], dict):
            raise ConfigError(f"slot {key!r} must be an object: {data[key]!r}")
        where = f"slot {key!r}: "
        _check_keys(data[key], where)
        if "candidate_steps" not in data[key]:
            raise ConfigError(f"{where}candidate_steps is missing")
        slots[int(key)] = _settings({**shared, **data[key]}, where)
    return slots


def _check_keys(values: Mapping[str, Any], where: str) -> None:
    known = SlotSettings.__struct_fields__
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}unknown key {key!r}; known: {', '.join(known)}")


def _settings(values: Mapping[str, Any], where: str) -> SlotSettings:
    try:
        return msgspec.convert(values, SlotSettings)
    except msgspec.ValidationError as error:
        said, _, key = str(error).rpartition(" - at `$.")
        raise ConfigError(f"{where}{key.rstrip('`')}: {said}") from None


def policy_of(config: EngineConfig) -> LengthPolicy:
    """The settings' policy."""
    if config.drafter == "none":
        return StaticPolicy(OFF)
    steps, top_k = config.num_steps, config.eagle_topk
    # What a drafter of one's own can draft, only its launch tier tells.
    trees = ":" not in config.drafter
    policy = load_policy(config.adaptive, steps, top_k, config.num_draft_tokens, trees)
    for name in policy.ignores:
        if getattr(config, name) != getattr(EngineConfig, name):
            raise ConfigError(
                f"{name}: the length policy {config.adaptive!r} takes no account of it; leave it "
                f"out: {getattr(config, name)!r}"
            )
    return policy


def nearest_tier(config: EngineConfig, tiers: Iterable[Tier]) -> Tier:
    """The one that is most like the launch settings."""
    return min(tiers, key=lambda t: (t.top_k != config.eagle_topk, abs(t.steps - config.num_steps)))
