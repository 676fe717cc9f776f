"""What grammars take is bounded by the process's real memory, whatever they say of themselves."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import pytest

from overlap_spec import Engine
from overlap_spec.errors import ConfigError
from overlap_spec.grammar import Grammar, GrammarCompiler, Vocabulary
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Matcher
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.memory import MemoryCeiling, machine_bytes, rss_bytes, trim
from tests.support.serving import wait_for
from tests.support.tiers import few

VOCABULARY = Vocabulary((b"a", b"b", b""), 3, (2,))
MIB = 2**20


class Hoard(CompiledGrammar):
    """Says that it takes a byte, and takes 20 MiB in small blocks."""

    living: ClassVar[weakref.WeakSet[Hoard]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.living.add(self)
        self.blocks = [bytes(1000) for _ in range(20 * MIB // 1000)]

    @property
    def memory_bytes(self) -> int:
        return 1

    def matcher(self) -> Matcher:
        raise NotImplementedError


class Hoarding(Backend):
    name = "hoarding"

    def __init__(self) -> None:
        self.vocabulary = VOCABULARY

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        del grammar
        return Hoard()


def grammar(number: int) -> Grammar:
    return Grammar.regex(f"a{{{number + 1}}}")


def test_cached_grammars_go_before_the_ceiling_is_passed() -> None:
    gc.collect()
    trim()
    ceiling = MemoryCeiling(rss_bytes() + 100 * MIB)
    with GrammarCompiler(Hoarding(), isolated=False, ceiling=ceiling) as compiler:
        for number in range(30):
            compiler.compile(grammar(number))
            # The last one came after the look. Not how many there are: what else this process
            # gives back meanwhile makes room for more.
            assert rss_bytes() <= ceiling.most_bytes + 30 * MIB
        # The newest is still there.
        assert compiler.submit(grammar(29)).done()
        found = compiler.snapshot()
        assert found["evicted"] >= 20
        assert found["failures"] == {}
    assert not Hoard.living


def test_without_anything_to_drop_new_grammars_are_refused_by_name() -> None:
    trim()
    ceiling = MemoryCeiling(rss_bytes() + 60 * MIB)
    with GrammarCompiler(Hoarding(), isolated=False, ceiling=ceiling) as compiler:
        in_use: list[CompiledGrammar] = []

        def use_more(_: object) -> None:
            in_use.append(compiler.compile(grammar(len(in_use))))

        with pytest.raises(CompileFailure, match=r"memory_limit_bytes.*try again later") as caught:
            deque(map(use_more, range(30)))
        assert (caught.value.kind, caught.value.param) == ("no_memory", "regex")
        assert len(in_use) < 8
        assert compiler.snapshot()["failures"] == {"no_memory": 1}
        # It is not remembered: what those who end give back serves the next.
        in_use.clear()
        trim()
        compiler.compile(grammar(29))


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "here"])
@pytest.mark.parametrize("thinks", few([True, False], True), ids=["thinks", "answers"])
def test_a_grammar_goes_with_its_last_user(isolated: bool, thinks: bool) -> None:
    """Not when the interpreter looks for cycles, which may be long after."""
    gc.collect()
    gc.disable()
    try:
        backend = load("reference")(VOCABULARY)
        with GrammarCompiler(backend, 0, isolated=isolated) as compiler:
            given = Grammar.regex("a+b")
            compiled = compiler.compile(given.after_thinking() if thinks else given)
            gone = weakref.ref(compiled)
            del compiled
            # Threads end what they do with it.
            wait_for(lambda: gone() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("lines", "limits", "least"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "3000000"}, 3_000_000),
        ("0::/\n", {"memory.max": "2000000\n"}, 2_000_000),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "1000000"}, 1_000_000),
        # In a container the path is the host's.
        ("4:memory:/docker/x\n", {"memory/memory.limit_in_bytes": "1000000"}, 1_000_000),
        ("4:cpu,cpuacct:/a\n", {"memory/a/memory.limit_in_bytes": "1000000"}, None),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_memory_is_the_machines_or_the_control_groups(
    tmp_path: Path, lines: str, limits: dict[str, str], least: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    for name, text in limits.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    whole = machine_bytes(tmp_path / "nowhere")
    assert whole > 100 * MIB
    assert machine_bytes(tmp_path) == (whole if least is None else least)


def test_a_ceiling_under_what_the_engine_takes_is_told_at_the_start(tiny: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="memory_limit_bytes is 1000000, and the engine takes"):
        Engine(**tiny, memory_limit_bytes=1_000_000)
    with Engine(**tiny) as engine:
        assert rss_bytes() < engine.memory_limit_bytes < machine_bytes()
