"""The figures in the embedded model's card: written by the benchmark's run, beside the aims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: written by bench.embedded -->", "<!-- end of figures -->"
NAMES = {
    "seen": "extraction, written phrasings",
    "unseen": "extraction, held-out phrasings",
    "fresh": "extraction, phrasings written afterwards",
    "open": "extraction, 100 sentences of ten open domains",
    "wide": "extraction, texts by grammar",
    "seen_tools": "tool calls, written phrasings",
    "unseen_tools": "tool calls, held-out phrasings",
}
# What is aimed at: title, path in the figures, least value.
AIMS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("exact, written phrasings", ("seen", "exact"), 0.85),
    ("fields, written phrasings", ("seen", "fields"), 0.95),
    ("exact, held-out phrasings", ("unseen", "exact"), 0.60),
    ("exact, open domains", ("open", "exact"), 0.60),
    ("tool calls, written phrasings", ("seen_tools", "exact"), 0.90),
    ("tool calls, held-out phrasings", ("unseen_tools", "exact"), 0.65),
    ("questions about a text", ("choice", "exact"), 0.85),
    ("accept length, chain of 5", ("seen", "accept_length"), 3.9),
    ("accept length, GSM8K", ("gsm8k_accept_length",), 4.0),
    ("valid JSON without a grammar", ("free", "json"), 0.98),
)


def pick(figures: dict[str, Any], path: tuple[str, ...]) -> float:
    """The figure at ``path``."""
    found: Any = figures
    for key in path:
        found = found[key]
    return float(found)


def card_figures(results: dict[str, Any], cases: int, command: str) -> str:
    """The tables of one run as Markdown."""
    chain, tree = results["chain of 5"], results["tree of 16, top-k 4"]
    lines = [
        f"`{command}`, greedy, {cases} cases a row, unseen fillers, the schema's grammar on:",
        "",
        "| | exact | fields | accept length, chain of 5 | tree of 16 |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for kind, name in NAMES.items():
        row = chain[kind]
        wide = f"{tree[kind]['accept_length']:.2f}" if kind in tree else ""
        lines.append(
            f"| {name} | {row['exact']:.3f} | {row['fields']:.3f} | {row['accept_length']:.2f} "
            f"| {wide} |"
        )
    lines += [
        f"| yes/no and choice questions about a text | {chain['choice']['exact']:.3f} | | | |",
        f"| GSM8K questions, no grammar | | | {chain['gsm8k_accept_length']:.2f} "
        f"| {tree['gsm8k_accept_length']:.2f} |",
        "",
        f"Without a grammar {chain['free']['json']:.3f} of the answers are JSON objects (accept "
        f"length {chain['free']['accept_length']:.2f}).",
        "",
        "Fields by the shape of the right value:",
        "",
        "| | written | held out | written afterwards | open domains |",
        "|---|---|---|---|---|",
    ]
    parts = [chain[kind]["shapes"] for kind in ("seen", "unseen", "fresh", "open")]
    for shape in sorted(set().union(*parts)):
        texts = [f"{part[shape]:.2f}" if shape in part else "" for part in parts]
        lines.append(f"| {shape} | {' | '.join(texts)} |")
    lines += ["", "| aim | | reached | |", "|---|---|---|---|"]
    for name, path, least in AIMS:
        value = pick(chain, path)
        lines.append(
            f"| {name} | {least} | {value:.3f} | {'reached' if value >= least else 'missed'} |"
        )
    return "\n".join(lines)


def write_card(path: Path, results: dict[str, Any], cases: int, command: str) -> None:
    """Put a run's figures between the card's marks.

    Raises:
        ValueError: the card has no marks.
    """
    text = path.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no place for figures: {BEGIN} … {END}")
    figures = card_figures(results, cases, command)
    path.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}", "utf-8")
