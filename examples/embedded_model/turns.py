"""User turns of tool calls by grammar, and the turns after a tool's result."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from examples.embedded_model.cases import CaseMaker, compact
from examples.embedded_model.fillers import read_lines
from examples.embedded_model.templates import Domain, Template, forbidden_grams, parse_template
from examples.embedded_model.wide import WideFillers

BEFORE = (
    *("", "", "", "", "Please ", "please ", "Could you ", "Can you ", "I want to ", "Would you "),
    *("Hi, ", "Hello, please ", "I would like you to ", "Now ", "You should ", "Hey, can you "),
    *("I need you to ", "It would be nice to ", "Let us ", "We want to ", "Kindly "),
)
AFTER = ("", "", "", " please", ", please", " now", " for me", ", thanks", " right away", " today")


@cache
def more_turns() -> dict[str, dict[str, list[str]]]:
    """Tool → place (v, o, s) → sentence parts."""
    found: dict[str, dict[str, list[str]]] = {}
    parts: dict[str, list[str]] = {}
    for line in read_lines("tools_more.txt"):
        kind, _, rest = line.partition(" ")
        if kind == "=":
            parts = found[rest] = {"v": [], "o": [], "s": []}
        elif not parse_template("part", rest).grams() & forbidden_grams():
            parts[kind].append(rest)
    return found


class WideTools(CaseMaker):
    """Tool calls whose user turns are put together from parts.

    Args:
        rng: Source of all choices.
    """

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.fillers = WideFillers(rng)

    def _turn(self, tool: Domain) -> Template:
        if self.rng.random() < 0.4:
            return super()._turn(tool)
        parts = more_turns()[tool.names[0]]
        for _ in range(20):
            made = parse_template(f"{tool.name}:turn", self._text(parts))
            if not made.grams() & forbidden_grams():
                return made
        return super()._turn(tool)

    def _text(self, parts: dict[str, list[str]]) -> str:
        if parts["s"] and self.rng.random() < 0.35:
            return self.rng.choice(parts["s"])
        verb = self.rng.choice(parts["v"])
        used = set(parse_template("v", verb).slots)
        options: list[str] = []
        for option in self.rng.sample(parts["o"], len(parts["o"])):
            slots = set(parse_template("o", option).slots)
            if not slots & used and self.rng.random() < 0.6:
                options.append(option)
                used |= slots
        before, after = self.rng.choice(BEFORE), self.rng.choice(AFTER)
        text = before + " ".join([verb, *options]) + after
        end = "?" if before.strip().endswith("you") and "should" not in before else "."
        return text[0].upper() + text[1:] + (end if self.rng.random() < 0.8 else "")


RESULTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "get_weather": (
        ("temperature snum:-15-40", "condition weather"),
        ("It is {temperature} degrees and {condition}.", "{condition}, {temperature} degrees."),
    ),
    "book_flight": (
        ("flight flight", "price money", "departure time"),
        ("Booked: flight {flight} at {departure} for ${price}.", "Your flight is {flight}."),
    ),
    "track_order": (
        ("status enum:pending|shipped|delivered", "city city"),
        ("The order is {status}, last seen in {city}.", "It is {status} in {city}."),
    ),
    "get_stock_price": (
        ("price money", "currency currency"),
        ("The price is {price} {currency}.", "It costs {price} {currency}."),
    ),
    "convert_currency": (("result money",), ("That is {result}.", "You get {result}.")),
    "calculate": (("result int:1-9999",), ("The result is {result}.", "It is {result}.")),
    "find_hotel": (
        ("name hotel", "rate money"),
        ("{name} has a room for ${rate}.", "I found {name} at ${rate} a night."),
    ),
    "get_directions": (
        ("km int:2-2000", "minutes int:5-900"),
        ("It is {km} km and takes {minutes} minutes.", "{km} km, {minutes} minutes."),
    ),
}


def result_turn(rng: Random, fillers: WideFillers, tool: str) -> tuple[str, str]:
    """(what the tool returns as JSON, what the assistant says of it)."""
    if tool not in RESULTS or rng.random() < 0.1:
        if rng.random() < 0.3:
            message = fillers.draw("symptom")[0]
            return compact({"error": message}), f"The call failed: {message}."
        done = rng.choice(({"ok": True}, {"status": "done"}, {"success": True}, "ok"))
        return compact(done), "Done."
    fields, wordings = RESULTS[tool]
    values: dict[str, Any] = {}
    for field in fields:
        name, _, kind = field.partition(" ")
        values[name] = fillers.draw(kind)[0]
    shown = {k: v if isinstance(v, str) else compact(v) for k, v in values.items()}
    words = rng.choice(wordings).format(**shown)
    return compact(values), words[0].upper() + words[1:]
