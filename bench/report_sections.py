"""What the report shows of each benchmark: tables and plots."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#4e79a7", "#f2a541", "#59a14f", "#af7aa1", "#76b7b2", "#9c755f", "#8cb0d9", "#e15759")
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
Record = dict[str, Any]
Samples = Sequence[dict[str, Any]]
Draw = Callable[[Axes], None]


class Page:
    """One section under way; ``name`` keeps the ids in its plots apart from other sections'."""

    def __init__(self, name: str) -> None:
        self.name, self.parts = name, list[str]()

    def html(self) -> str:
        """The section."""
        return "".join(self.parts)

    def title(self, text: str) -> None:
        """A heading."""
        self.parts.append(f"<h3>{html.escape(text)}</h3>")

    def text(self, text: str, bad: bool = False) -> None:
        """A paragraph."""
        mark = ' class="bad"' if bad else ""
        self.parts.append(f"<p{mark}>{html.escape(text)}</p>")

    def verdict(self, good: bool, yes: str, no: str) -> None:
        """What a check found."""
        self.text(yes if good else no, bad=not good)

    def table(self, heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
        """A table; numbers are shown at four digits, None as a dash."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(show(cell))}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        self.parts.append(f"<table><tr>{head}</tr>{body}</table>")

    def plot(self, draw: Draw, height: float = 3.0, width: float = 8.5) -> None:
        """A plot as SVG in the page itself."""
        salt = f"{self.name}-{len(self.parts)}"
        with rc_context({"svg.hashsalt": salt, "svg.fonttype": "none", "font.size": 10}):
            figure = Figure(figsize=(width, height), layout="constrained")
            axes = figure.subplots()
            draw(axes)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata=NO_METADATA)
        svg = buffer.getvalue()
        svg = svg[svg.index("<svg") :]
        # Ids are unique in a document, and a page has many plots.
        svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{salt}-", svg)
        self.parts.append(f"<figure>{svg}</figure>")

    def bars(
        self, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], label: str
    ) -> None:
        """Grouped bars: a group of bars for each of ``groups``, one bar a series."""

        def draw(axes: Axes) -> None:
            width = 0.8 / len(series)
            for index, (name, values) in enumerate(series.items()):
                at = [g - 0.4 + (index + 0.5) * width for g in range(len(groups))]
                heights = [0.0 if value is None else value for value in values]
                colour = COLOURS[index % len(COLOURS)]
                drawn = axes.bar(at, heights, width * 0.94, label=name, color=colour)
                axes.bar_label(drawn, [_short(value) for value in values], fontsize=7, padding=1)
            axes.set_xticks(range(len(groups)), [name.replace(" ", "\n") for name in groups])
            axes.set_ylabel(label)
            axes.margins(y=0.15)
            if len(series) > 1:
                axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left",
                            bbox_to_anchor=(0, 1))  # fmt: skip

        self.plot(draw, height=3.4)


def show(value: Any) -> str:
    """A cell."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def at(times: Mapping[str, float] | None, name: str = "p50") -> float | None:
    """One of the percentiles, None where there are none."""
    return None if times is None else times[name]


def overlap(page: Page, record: Record, _: Samples) -> None:
    """Modes side by side."""
    page.verdict(record["equal"], "Outputs and accept lengths are the same in all modes.",
                 "Outputs differ between the modes.")  # fmt: skip
    entries = record["rows"] | {f"batch {n}": e for n, e in record["batches"].items()}
    modes = list(record["modes"])
    rows = [
        (name, mode, figures["seconds"],
         entry["ratio_seconds"].get(mode, {"median": 1.0})["median"], figures["tpot_ms"],
         entry["ratio_tpot"].get(mode, {"median": 1.0})["median"], figures["ttft_ms"],
         figures["accept_length"], figures["hidden_fraction"], figures["grammar_ms"],
         figures["exposed_ms"])
        for name, entry in entries.items()
        for mode, figures in entry["modes"].items()
    ]  # fmt: skip
    heads = ("traffic", "mode", "seconds", "ratio", "TPOT", "ratio", "TTFT", "accept", "hidden",
             "grammar / step", "exposed / step")  # fmt: skip
    page.table(heads, rows)
    series = {
        mode: [entry["modes"][mode]["tpot_ms"] for entry in entries.values()] for mode in modes
    }
    page.bars(list(entries), series, "TPOT, ms")


def adaptive(page: Page, record: Record, _: Samples) -> None:
    """Policies by phase."""
    page.verdict(record["equal"], "Outputs are the same under all policies.",
                 "Outputs differ between policies.")  # fmt: skip
    phases = record["phases"]
    policies = list(phases[0]["policies"])
    page.table(
        ("policy", *(f"{phase['name']}: {what}" for phase in phases
                     for what in ("token/s", "of the best", "accept", "drafted"))),
        ((name, *(phase["policies"][name][key] for phase in phases
                  for key in ("tokens_per_second", "of_best", "accept_length", "draft_length")))
         for name in policies),
    )  # fmt: skip
    series = {name: [phase["policies"][name]["of_best"] for phase in phases] for name in policies}
    page.bars([phase["name"] for phase in phases], series, "rate over the best static tier's")


def gsm8k(page: Page, record: Record, _: Samples) -> None:
    """Sides."""
    share = record["equal"]
    page.verdict(share == 1, f"All {record['questions']} answers are the same on all sides.",
                 f"Only {share:.3f} of the answers are the same on all sides.")  # fmt: skip
    page.text(f"{record['shots']} shots, {record['parallel']} requests at once.")
    page.table(
        ("side", "accuracy", "invalid", "latency s", "token/s", "ratio", "accept", "TTFT p50",
         "TTFT p99", "TPOT p50", "TPOT p99"),
        ((name, s["accuracy"], s["invalid"], s["latency_s"], s["tokens_per_second"],
          record["ratio"].get(name, {"median": 1.0})["median"], s["accept_length"],
          at(s["ttft_ms"]), at(s["ttft_ms"], "p99"), at(s["tpot_ms"]), at(s["tpot_ms"], "p99"))
         for name, s in record["sides"].items()),
    )  # fmt: skip
    names = list(record["sides"])
    rates = [record["sides"][name]["tokens_per_second"] for name in names]
    page.bars(names, {"output throughput": rates}, "token/s")


def json_schema(page: Page, record: Record, _: Samples) -> None:
    """Backends, constrained and not."""
    backends = record["backends"]
    valid = all(b["constrained"]["valid_share"] in (None, 1) for b in backends.values())
    page.verdict(valid, "Every constrained output that ended by itself is valid.",
                 "Not all constrained outputs are valid.")  # fmt: skip
    page.text("The schema is not in the prompt, so an unconstrained answer can only guess at it.")
    heads = ("backend", "", "valid", "objects", "exact keys", "token/s", "TTFT p50", "TPOT p50",
             "step", "accept", "grammar / step", "hidden", "compile p50", "refused")  # fmt: skip
    rows = []
    for name, entry in backends.items():
        for kind in ("constrained", "unconstrained"):
            s, own = entry[kind], kind == "constrained"
            rows.append(
                (name, kind, s["valid_share"], s["objects"], s["exact_keys"],
                 s["tokens_per_second"], at(s["ttft_ms"]), at(s["tpot_ms"]), s["step_ms"],
                 s["accept_length"], s.get("grammar_ms_per_step"), s.get("hidden_fraction"),
                 at(entry["compile_ms"]) if own else None, entry["refused"] if own else None)
            )  # fmt: skip
    page.table(heads, rows)
    series = {
        kind: [entry[kind]["step_ms"] for entry in backends.values()]
        for kind in ("constrained", "unconstrained")
    }
    page.bars(list(backends), series, "time of a step, ms")


def peers(page: Page, record: Record, _: Samples) -> None:
    """Systems side by side."""
    heads = ("system", "token/s", "ours over it", "least", "most", "TTFT p50", "TPOT p50",
             "accept", "ended", "valid", "same text")  # fmt: skip
    for workload, systems in record["workloads"].items():
        page.title(workload)
        rows = []
        for name, s in systems.items():
            ratio = s["ratio"] or {"median": 1.0, "min": None, "max": None}
            rows.append(
                (name, s["tokens_per_second"], ratio["median"], ratio["min"], ratio["max"],
                 at(s["ttft_ms"]), at(s["tpot_ms"]), s["accept_length"],
                 f"{s['finished']} of {s['requests']}", s["valid_share"], s["same_text"])
            )  # fmt: skip
        page.table(heads, rows)
        names = list(systems)
        rates = [systems[name]["tokens_per_second"] for name in names]
        page.bars(names, {workload: rates}, "token/s")
    page.title("Where a step of ours goes")
    spent = {w: systems["overlap-spec"] for w, systems in record["workloads"].items()}
    names = sorted({name for s in spent.values() for name in s["busy_ms_per_step"]})
    page.table(("stream: span, ms a step", *spent),
               [("a step", *(s["step_ms"] for s in spent.values())),
                *((n, *(s["busy_ms_per_step"].get(n) for s in spent.values())) for n in names)],
               )  # fmt: skip
    page.table(("system", "how"), ((n, s["how"]) for n, s in record["systems"].items()))
    if record["missing"]:
        page.table(("missing", "why"), record["missing"].items())


def maskbench(page: Page, record: Record, _: Samples) -> None:
    """Classes and mask times."""
    counts = record["counts"]
    page.bars([n.replace("_", "\n") for n in counts], {"schemas": list(counts.values())}, "schemas")
    names = ("ttfm_ms", "tbm_us")
    keys = ("p50", "p90", "p99", "max", "n")
    page.table(("", *keys), ((n, *(record[n][k] for k in keys)) for n in names if record.get(n)))
    if record.get("failures"):
        page.table(("schema", "class", "why"),
                   ((f["id"], f["class"], f["reason"]) for f in record["failures"]))  # fmt: skip


def soak(page: Page, record: Record, samples: Samples) -> None:
    """What is held over the requests."""
    page.verdict(record["flat"], "Memory stays level.", "Memory grows.")
    keys = ("requests", "requests_per_second", "tokens")
    page.table(("", "value"), ((key, record[key]) for key in keys))
    if samples:

        def draw(axes: Axes) -> None:
            done = [sample["requests"] for sample in samples]
            axes.plot(done, [sample["rss_mib"] for sample in samples], color=COLOURS[0])
            axes.set_ylim(bottom=0)
            axes.set_xlabel("requests ended")
            axes.set_ylabel("resident memory, MiB")

        page.plot(draw)


def plain(page: Page, record: Record, _: Samples) -> None:
    """A record of any benchmark: its own fields, flattened."""
    head = {"bench", "date", "command", "quick", "seed", "machine", "versions", "commit",
            "repetitions", "samples"}  # fmt: skip
    own = {key: value for key, value in record.items() if key not in head}
    page.table(("figure", "value"), list(flat(own))[:200])


def flat(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Leaves of plain data with their paths."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{path} › {key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, inner in enumerate(value):
            yield from flat(inner, f"{path} › {index}")
    elif isinstance(value, list):
        yield path, ", ".join(show(item) for item in value)
    else:
        yield path, value


SECTIONS: dict[str, Callable[[Page, Record, Samples], None]] = {
    "overlap": overlap,
    "adaptive": adaptive,
    "gsm8k": gsm8k,
    "json_schema": json_schema,
    "peers": peers,
    "maskbench": maskbench,
    "soak": soak,
}
