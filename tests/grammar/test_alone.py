"""Grammars by themselves: no torch, neither at import nor for masks."""

import subprocess
import sys

import pytest

from overlap_spec.grammar.backends import names
from tests.support.tiers import few

IMPORTS = """
import sys
from overlap_spec.grammar import Grammar, GrammarCompiler, Matcher, Vocabulary
from overlap_spec.grammar.adapters import llama_cpp
heavy = {"torch", "transformers", "tokenizers", "xgrammar", "llguidance"} & set(sys.modules)
assert not heavy, heavy
"""
ALONE = """
import sys
# As if they were not installed.
sys.modules["torch"] = sys.modules["transformers"] = None
import numpy as np
from overlap_spec.grammar import Grammar, GrammarCompiler, Vocabulary

vocabulary = Vocabulary((*(bytes([i]) for i in range(256)), b"", b'{"id":1'), 258, (256,))
schema = {"type": "object", "properties": {"id": {"enum": [12, 3]}}, "required": ["id"]}
with GrammarCompiler.for_vocabulary(vocabulary, sys.argv[1]) as compiler:
    compiled = compiler.compile(Grammar.json_schema(schema))
    assert compiler.compile(Grammar.json_schema(schema)) is compiled
matcher = compiled.matcher()
assert matcher.forced_bytes() == b'{"id":'
assert matcher.accept(257)
rows = np.empty((3, vocabulary.words), np.int32)


def legal(row):
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


matcher.fill(rows[0])
assert legal(rows[0]) == [ord("2")]
links = np.array([[257, ord("2"), ord("}")], [1, 2, -1], [-1, -1, -1]])
matcher.fill_tree(*links, rows)
assert [legal(row) for row in rows] == [[ord("2")], [ord("}")], [256]]
matcher.rollback(1)
matcher.fill(rows[0])
assert legal(rows[0]) == [ord("{"), 257]
assert all(matcher.accept(token) for token in [*b'{"id":3}', 256])
assert matcher.is_terminated
"""


def test_nothing_heavy_is_imported() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


@pytest.mark.parametrize("backend", few(names(), "auto"))
def test_masks_need_no_torch(backend: str) -> None:
    subprocess.run([sys.executable, "-c", ALONE, backend], check=True)
