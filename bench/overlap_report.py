"""From raw samples of ``bench.overlap`` to its figures and tables.

Everything is made of the samples alone, so that a record can be made again from its lines:
``summary([json.loads(line) for line in open("out.samples.jsonl")])``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import median, paired, spread
from overlap_spec.config import OVERLAP_MODES

MODES = tuple(reversed(OVERLAP_MODES))
JUDGED = "batch 4"

Samples = Sequence[dict[str, Any]]
ByMode = dict[str, list[dict[str, Any]]]


def summary(samples: Samples) -> dict[str, Any]:
    """The record's own fields; see ``bench.overlap``."""
    rows: dict[str, Any] = {}
    batches: dict[str, Any] = {}
    for name, by_mode in group(samples).items():
        shares = saving_shares(by_mode)
        entry = {
            "modes": {mode: figures(by_mode[mode]) for mode in MODES},
            "ratio_seconds": ratios(by_mode, "seconds"),
            "ratio_tpot": ratios(by_mode, "tpot_ms"),
            "saving_share": spread(shares) if shares else None,
        }
        (batches if name.startswith("batch ") else rows)[name] = entry
    judged = batches[JUDGED]
    saving = judged["saving_share"]
    return {
        "modes": judged["modes"],
        "saving_share": saving["median"] if saving else None,
        "rows": rows,
        "batches": {name.removeprefix("batch "): entry for name, entry in batches.items()},
    }


def group(samples: Samples) -> dict[str, ByMode]:
    """Workload → mode → its samples in the order of their repetitions."""
    grouped: dict[str, ByMode] = {}
    for sample in samples:
        by_mode = grouped.setdefault(sample["workload"], {mode: [] for mode in MODES})
        by_mode[sample["mode"]].append(sample)
    return grouped


def figures(samples: Samples) -> dict[str, Any]:
    """One mode's figures at one workload: medians over the repetitions."""
    names = ("tpot_ms", "step_ms", "grammar_ms", "exposed_ms", "grammar_share", "seconds")
    grammar_ms = sum(s["grammar_ms"] * s["steps"] for s in samples)
    exposed_ms = sum(s["exposed_ms"] * s["steps"] for s in samples)
    return {
        **{name: median(s[name] for s in samples) for name in names},
        "hidden_fraction": max(0.0, 1 - exposed_ms / grammar_ms) if grammar_ms else None,
        "ttft_ms": median(ms for s in samples for ms in s["ttft_ms"]),
        "accept_length": samples[0]["accept_length"],
        "output_tokens": samples[0]["output_tokens"],
        "output_sha256": samples[0]["output_sha256"],
        "tpot_ms_spread": spread(s["tpot_ms"] for s in samples),
    }


def ratios(by_mode: ByMode, name: str) -> dict[str, dict[str, float]]:
    """Mode → spread of a figure's ratio to ``none``, pair by pair."""
    values = {mode: [s[name] for s in by_mode[mode]] for mode in MODES}
    return {mode: paired(values[mode], values["none"]) for mode in MODES if mode != "none"}


def saving_shares(by_mode: ByMode) -> list[float]:
    """Which share of none's grammar time once-sync saved, pair by pair; see ``bench.overlap``."""
    return [
        (none["tpot_ms"] - once["tpot_ms"]) / (none["grammar_share"] * none["tpot_ms"])
        for none, once in zip(by_mode["none"], by_mode["once-sync"], strict=True)
        if none["grammar_share"] > 0
    ]


def print_tables(record: dict[str, Any], console: Console) -> None:
    """What a reader sees: durations of the kinds of traffic, then every batch size."""
    table = Table(title="Seconds (ratio to none, pair by pair)", title_justify="left")
    _columns(table, ["", *MODES])
    for name, row in record["rows"].items():
        cells = [f"{row['modes']['none']['seconds']:.3f}"]
        for mode, ratio in row["ratio_seconds"].items():
            cells.append(f"{row['modes'][mode]['seconds']:.3f} ({ratio['median']:.3f})")
        table.add_row(name, *cells)
    console.print(table)
    table = Table(title="All JSON; times in ms, the last three a step", title_justify="left")
    _columns(
        table,
        ["", "mode", "TPOT", "ratio", "TTFT", "accept", "hidden", "step", "grammar", "exposed"],
    )
    entries = {"union": record["rows"].get("JSON union")} | record["batches"]
    for name, entry in entries.items():
        for mode in MODES if entry else ():
            ratio = entry["ratio_tpot"].get(mode, {"median": 1.0})["median"]
            table.add_row(name, mode, *_cells(entry["modes"][mode], ratio))
        table.add_section()
    console.print(table)


def _cells(f: dict[str, Any], ratio: float) -> list[str]:
    hidden = "-" if f["hidden_fraction"] is None else f"{f['hidden_fraction']:.3f}"
    middle = [f"{f['tpot_ms']:.2f}", f"{ratio:.3f}", f"{f['ttft_ms']:.1f}"]
    times = [f"{f[name]:.2f}" for name in ("step_ms", "grammar_ms", "exposed_ms")]
    return [*middle, f"{f['accept_length']:.2f}", hidden, *times]


def _columns(table: Table, headings: Iterable[str]) -> None:
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("", "mode") else "right")
