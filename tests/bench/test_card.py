"""The card of the embedded model: its figures and what they are compared with."""

from __future__ import annotations

from typing import Any

import pytest

from bench import embedded


def results(exact: float) -> dict[str, Any]:
    row = {"exact": exact, "fields": 0.9, "accept_length": 4.0}
    kinds = ("seen", "unseen", "fresh", "open", "seen_tools", "unseen_tools", "wide")
    chain = dict.fromkeys(kinds, row) | {
        "choice": {"exact": exact}, "free": {"json": 1.0, "accept_length": 4.0},
        "gsm8k_accept_length": 4.1,
    }  # fmt: skip
    return {"chain of 5": chain, "tree of 16, top-k 4": chain}


def test_the_card_says_which_aims_are_missed(tmp_path):
    card = tmp_path / "README.md"
    card.write_text(f"before\n{embedded.BEGIN}\nold\n{embedded.END}\nafter\n")
    for exact in (0.5, 0.95):
        embedded.write_card(card, results(exact), 300, "python -m bench.embedded")
        text = card.read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "old" not in text
        wanted = "missed" if exact < 0.6 else "reached"
        assert f"| exact, held-out phrasings | 0.6 | {exact:.3f} | {wanted} |" in text
    card.write_text("no marks")
    with pytest.raises(ValueError, match="no place"):
        embedded.write_card(card, results(0.5), 300, "x")
