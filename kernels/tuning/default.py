"""Block sizes that fit every GPU from sm_80 on; where no measured table exists, these serve."""

from __future__ import annotations

TABLE: dict[str, dict[str, int]] = {
    "rms_norm": {"elements": 4096, "num_warps": 8},
    "rope": {"elements": 2048, "num_warps": 4},
    "silu_and_mul": {"block": 1024, "num_warps": 4},
    "move_kv": {"elements": 4096, "num_warps": 4},
    "apply_bitmask": {"block": 4096, "num_warps": 8},
    "choose": {"block": 4096, "num_warps": 8},
    "choose/filtered": {"block": 4096, "num_warps": 16},
    "top_candidates": {"block": 4096, "num_warps": 8},
    "experts": {"rows": 16, "columns": 64, "depth": 64, "num_warps": 4, "num_stages": 3},
    "experts/many": {"rows": 64, "columns": 64, "depth": 32, "num_warps": 4, "num_stages": 3},
}


def attention(
    rows: int, keys: int, warps: int, stages: int, waves: int = 2, split_keys: int = 256
) -> dict[str, int]:
    """At most ``max_splits`` shares of a request's keys, each of ``split_keys`` at least, and no
    more than ``waves`` programs a multiprocessor."""
    return {
        "rows": rows,
        "keys": keys,
        "waves": waves,
        "split_keys": split_keys,
        "max_splits": 64,
        "num_warps": warps,
        "num_stages": stages,
    }


# By head size. What a program holds fits in registers on sm_80 to sm_120, and in the 99 KiB of
# shared memory that sm_86, 89 and 120 have; two copies are under way while a block is computed.
for _head, _decode, _prefill in (
    (16, (64, 64, 4, 3), (128, 64, 8, 3)),
    (32, (64, 64, 4, 3), (128, 64, 8, 3)),
    (64, (64, 64, 4, 3), (128, 64, 8, 3)),
    (128, (64, 32, 8, 3), (128, 32, 8, 3)),
    (256, (32, 16, 4, 3), (64, 16, 8, 3)),
    (512, (32, 16, 8, 3), (32, 16, 8, 3)),
):
    TABLE[f"attention.decode/16bit/{_head}"] = attention(*_decode)
    TABLE[f"attention.prefill/16bit/{_head}"] = attention(*_prefill)
for _head, _keys, _rows in (
    (16, 64, 32), (32, 64, 32), (64, 32, 32), (128, 32, 16), (256, 16, 16), (512, 16, 16),
):  # fmt: skip
    TABLE[f"attention.decode/32bit/{_head}"] = attention(_rows, _keys, 4, 2)
    TABLE[f"attention.prefill/32bit/{_head}"] = attention(_rows, _keys, 4, 2)
