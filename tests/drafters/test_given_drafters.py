"""Drafters that are given as objects, and TensorRT-LLM's names of what drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlap_spec import AsyncEngine, tensorrt_llm
from overlap_spec.cli import serve
from overlap_spec.cli.flags import config_values
from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import Drafter, HostDraft
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError
from overlap_spec.tensorrt_llm import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    UserProvidedDecodingConfig,
    settings_of,
)


class Repeats(Drafter):
    """Drafts a token of its own choice, again and again."""

    host = True

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token, self.asked = token, 0

    @classmethod
    def build(cls, *_: Any) -> Repeats:
        return cls(65)

    def propose(self, histories: Any, tier: Any) -> list[HostDraft]:
        self.asked += len(histories)
        scores = -0.1 * np.arange(1, tier.steps + 1, dtype=np.float32)
        return [HostDraft(np.full(tier.steps, self.token), None, scores) for _ in histories]


def test_an_object_drafts_and_changes_no_text(tiny: dict[str, Any]) -> None:
    asked = {"max_tokens": 20, "temperature": 0}
    with Engine(**tiny, algorithm="none") as engine:
        plain = engine.generate("a prompt", None, asked)
    drafter = Repeats(plain.token_ids[1])
    settings = UserProvidedDecodingConfig(max_draft_len=3, drafter=drafter)
    with Engine(**{**tiny, **settings}) as engine:
        output = engine.generate("a prompt", None, asked)
        assert engine.core.worker.runner.drafter is drafter
    assert output.token_ids == plain.token_ids
    assert drafter.asked
    assert output.stats.accepted_drafts
    # A class of one is built.
    with Engine(**tiny, algorithm=Repeats, num_steps=2) as engine:
        assert engine.core.worker.runner.drafter.token == 65
        assert engine.snapshot()["drafter"]["name"].endswith(":Repeats")


def test_what_is_no_drafter_or_cannot_go_along_is_refused(tiny: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is no Drafter, nor a class of one"):
        Engine(**tiny, algorithm=object())
    with pytest.raises(ConfigError, match=r"^algorithm: .* several ranks' processes"):
        EngineConfig.build(algorithm=Repeats(1), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"^algorithm: .* the engine's own process"):
        AsyncEngine(algorithm=Repeats(1))


def test_tensorrt_llms_classes_are_our_settings() -> None:
    static = {"adaptive": "static"}
    assert EagleDecodingConfig(
        max_draft_len=4, speculative_model="head", eagle3_one_model=True
    ) == static | {"algorithm": "eagle3", "num_steps": 4, "draft": "head"}
    assert DraftTargetDecodingConfig(
        max_draft_len=3, speculative_model="small"
    ) == static | {"algorithm": "draft_model", "num_steps": 3, "draft": "small"}  # fmt: skip
    assert NGramDecodingConfig(
        max_draft_len=3, max_matching_ngram_size=4, is_public_pool=True, is_keep_all=False,
        is_use_oldest=True,
    ) == static | {
        "algorithm": "ngram", "num_steps": 3, "ngram_max_matching_size": 4,
        "ngram_public_pool": True, "ngram_keep_all": False, "ngram_use_oldest": True,
    }  # fmt: skip
    mtp = {"max_draft_len": 3, "num_nextn_predict_layers": 3}
    relaxed = {"relaxed_topk": 10, "relaxed_delta": 0.6}
    thinking = "use_relaxed_acceptance_for_thinking"
    found = MTPDecodingConfig(**mtp, **relaxed, **{thinking: True})
    assert found == static | {"algorithm": "mtp", "num_steps": 3, **relaxed}
    assert MTPDecodingConfig(**mtp, **relaxed, **{thinking: False}) == static | {
        "algorithm": "mtp", "num_steps": 3
    }  # fmt: skip
    for made in (found, NGramDecodingConfig(max_draft_len=3)):
        EngineConfig.build(**made)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"max_draft_len": 3}, "decoding_type must be one of Eagle, MTP"),
        ({"decoding_type": "Medusa"}, "'Medusa'"),
        ({"decoding_type": "MTP", "max_draft_length": 3}, "did you mean 'max_draft_len'"),
        ({"decoding_type": "User_Provided"}, "needs drafter"),
        (
            {"decoding_type": "MTP", "max_draft_len": 1, "num_nextn_predict_layers": 3},
            "3 is over max_draft_len 1",
        ),
    ],
)
def test_a_speculative_config_at_fault_is_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(config)


def test_a_yaml_file_of_tensorrt_llms_is_read(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(serve)
    params = typer.main.get_command(app).params
    file = tmp_path / "extra.yaml"
    file.write_text(
        "disable_overlap_scheduler: true\n"
        "speculative_config:\n"
        "  decoding_type: Eagle\n  max_draft_len: 4\n  speculative_model: /path\n"
    )
    assert config_values(file, params) == {
        "overlap": "none", "adaptive": "static", "algorithm": "eagle3", "num_steps": 4,
        "draft": "/path",
    }  # fmt: skip
    file.write_text(json.dumps({"speculative_config": {"decoding_type": "Eagle", "depth": 4}}))
    with pytest.raises(ConfigError, match=r"extra\.yaml: unknown field of speculative_config"):
        config_values(file, params)


def test_every_name_of_theirs_is_a_setting_of_ours() -> None:
    assert set(tensorrt_llm.NAMES.values()) <= set(EngineConfig.__dataclass_fields__)
