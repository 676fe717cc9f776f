"""The next-token module that a target brings along (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Attend, Layer, RMSNorm, embedding
from overlap_spec.models.rope import rope_table


@dataclass(frozen=True)
class MtpNames:
    """How a checkpoint names the tensors of a module.

    Attributes:
        prefix: What all of them start with; in a layout a pattern with the module's number.
        parts: Published name of a part → its name in :class:`MtpModule`. Whatever else there is
            belongs to the decoder layer.
        hidden_first: Whether the projection reads the target's feature before the embedding.
    """

    prefix: str
    parts: Mapping[str, str]
    hidden_first: bool = False

    def own(self, name: str) -> str:
        """A tensor's name in :class:`MtpModule`; a name that is none of the module's as it is."""
        if not name.startswith(self.prefix):
            return name
        rest = name.removeprefix(self.prefix)
        for published, own in self.parts.items():
            if rest.startswith(f"{published}."):
                return own + rest.removeprefix(published)
        return f"layer.{rest}"


LAYOUTS = (
    # DeepSeek's: a layer behind the target's last one.
    MtpNames(
        r"model\.layers\.(\d+)\.",
        {
            "enorm": "enorm",
            "hnorm": "hnorm",
            "eh_proj": "eh_proj",
            "shared_head.norm": "norm",
            "shared_head.head": "head",
            "embed_tokens": "embed_tokens",
        },
    ),
    # MiMo's.
    MtpNames(
        r"model\.mtp_layers\.(\d+)\.",
        {
            "token_layernorm": "enorm",
            "hidden_layernorm": "hnorm",
            "input_proj": "eh_proj",
            "final_layernorm": "norm",
        },
        hidden_first=True,
    ),
    # Qwen3-Next's.
    MtpNames(
        r"mtp\.()",
        {
            "pre_fc_norm_embedding": "enorm",
            "pre_fc_norm_hidden": "hnorm",
            "fc": "eh_proj",
            "norm": "norm",
            "layers.0": "layer",
        },
    ),
)


def find_modules(names: Collection[str]) -> list[MtpNames]:
    """The modules among a checkpoint's tensors, the first one first; empty if there are none."""
    found = {}
    for layout in LAYOUTS:
        (projection,) = (name for name, own in layout.parts.items() if own == "eh_proj")
        pattern = re.compile(f"{layout.prefix}{projection}\\.weight")
        for match in filter(None, map(pattern.fullmatch, names)):
            prefix = match[0].removesuffix(f"{projection}.weight")
            found[int(match[1] or 0)] = MtpNames(prefix, layout.parts, layout.hidden_first)
    return [found[number] for number in sorted(found)]


class MtpModule(nn.Module):
    """Predicts the target's next normed output from the last one and the token after it.

    ``embed_tokens`` and ``head`` exist where the checkpoint stores others than the target's.
    """

    rope: Tensor

    def __init__(self, config: ModelConfig, own_embedding: bool, own_head: bool) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        if own_embedding:
            self.embed_tokens = embedding(config.vocab_size, size)
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = Layer(config)
        self.norm = RMSNorm(size, eps)
        if own_head:
            self.head = nn.Linear(size, config.vocab_size, bias=False)
        table = rope_table(config.rope, config.head_dim, config.max_position)
        self.register_buffer("rope", table, persistent=False)

    def forward(self, embeds: Tensor, feature: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass of the module.

        Args:
            embeds: ``(T, hidden)``, the embedding of each row's token.
            feature: ``(T, hidden)``: of the position before it; the target's normed output, or in
                later draft steps this method's own.
            positions: int64 ``(T,)``, each row's token position.
            attend: As for the decoder, with layer 0.

        Returns:
            ``(T, hidden)`` after the module's norm: input of the head, and the next feature.
        """
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(feature)], -1))
        rotary = self.rope[positions].to(x.dtype)
        x, delta = self.layer(x, self.layer.input_layernorm(x), rotary, attend, 0)
        return self.norm.add(x, delta)[0]
