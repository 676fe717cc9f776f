"""Block sizes for sm_90: of heads of 64 and 128 the fastest on an H200 of those that spill no
registers, at trees behind 2,048 to 32,768 keys and at a prompt's chunk; others by the compiler's
figures alone."""

from __future__ import annotations

from overlap_spec.kernels.tuning.default import attention

TABLE: dict[str, dict[str, int]] = {
    "attention.decode/16bit/64": attention(64, 32, 4, 3, split_keys=128),
    "attention.decode/16bit/128": attention(64, 32, 4, 3, split_keys=128),
    "attention.decode/16bit/256": attention(64, 32, 8, 3),
    "attention.decode/16bit/512": attention(32, 32, 8, 3),
    "attention.prefill/16bit/64": attention(128, 64, 4, 3),
    "attention.prefill/16bit/128": attention(128, 64, 8, 3, waves=1),
    "attention.prefill/16bit/256": attention(128, 32, 8, 3),
    "attention.prefill/16bit/512": attention(32, 32, 8, 3),
}
