"""Block sizes for sm_90, chosen by what compiles without spilling registers; not measured yet."""

from __future__ import annotations

from overlap_spec.kernels.tuning.default import attention

TABLE: dict[str, dict[str, int]] = {
    "attention.decode/16bit/128": attention(64, 32, 4, 3),
    "attention.decode/16bit/256": attention(64, 32, 8, 3),
    "attention.decode/16bit/512": attention(32, 32, 8, 3),
    "attention.prefill/16bit/128": attention(128, 64, 8, 3),
    "attention.prefill/16bit/256": attention(128, 32, 8, 3),
    "attention.prefill/16bit/512": attention(32, 32, 8, 3),
}
