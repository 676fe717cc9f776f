"""What worker processes do: a job is pickled for its worker, and its answer comes back as data, for
a worker works on what anybody sends, and may be in other hands."""

from __future__ import annotations

import dataclasses
import json
import pickle
import struct
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.contract import Backend, CompiledGrammar
from overlap_spec.grammar.drafting.byte_states import byte_states
from overlap_spec.grammar.drafting.state_table import StateTable
from overlap_spec.grammar.ir.reach import Reach, Thinking, reach
from overlap_spec.grammar.isolation.check import violation
from overlap_spec.grammar.lowering.lower import lower, to_plan
from overlap_spec.grammar.reasoning.reply import GAP, MOST_GAP
from overlap_spec.grammar.room.rules import RoomRules, room_rules
from overlap_spec.grammar.spec import Grammar

# Longest plan of what a compiled grammar leaves to a matcher.
PLAN_BYTES = 40_000
# How libraries report that memory ran out, in an error or on standard error.
OUT_OF_MEMORY = (
    "bad_alloc",
    "memory allocation of",
    "out of memory",
    "cannot allocate memory",
    "resource temporarily unavailable",
)
# Before a compiled grammar's plan and its data: how long the plan is, whether there is data
# (without, the grammar is rebuilt where it is wanted), and its reach, -1 where it has none.
FORM = struct.Struct("<I?iiiH")
encode = msgspec.msgpack.encode


def means_out_of_memory(text: str) -> bool:
    """Whether a library's error reports that memory ran out."""
    return any(mark in text.lower() for mark in OUT_OF_MEMORY)


class Job(ABC):
    """Something to do in a worker; ``param`` is the request's field at fault, where it fails."""

    param: str | None = None

    @property
    @abstractmethod
    def failed(self) -> str:
        """How the error of one that fails begins."""

    @abstractmethod
    def work(self, backend: Backend | None) -> bytes:
        """Do it, in the worker.

        Raises:
            GrammarError: the grammar is refused.
        """

    @abstractmethod
    def read(self, backend: Backend | None, answer: bytes) -> Any:
        """The result, in the process that asked."""


@dataclass(frozen=True)
class GrammarJob(Job):
    """A job for a grammar; what only its caller needs of it stays there."""

    grammar: Grammar

    def __post_init__(self) -> None:
        object.__setattr__(self, "grammar", dataclasses.replace(self.grammar, output=None))

    @property
    def param(self) -> str:  # type: ignore[override]
        return self.grammar.kind

    @property
    def failed(self) -> str:
        return f"the {self.grammar.kind} grammar was not compiled"


class Compile(GrammarJob):
    """Compile a grammar: its `CompiledGrammar`."""

    def work(self, backend: Backend | None) -> bytes:
        assert backend is not None
        try:
            compiled = compile_whole(backend, self.grammar)
        except GrammarError as error:
            if means_out_of_memory(str(error)):
                raise MemoryError from None
            raise
        if len(compiled.plan) > PLAN_BYTES:
            reason = "uniqueItems or minProperties stands in too many places"
            raise GrammarError(reason, self.grammar.kind)
        plan, data = compiled.plan, compiled.serialize()
        *told, begins = compiled.reach or (-1, -1, -1, b"")
        head = FORM.pack(len(plan), data is not None, *told, len(begins))
        return b"".join((head, plan, begins, data or b""))

    def read(self, backend: Backend | None, answer: bytes) -> CompiledGrammar:
        assert backend is not None
        size, has_data, least, fixed, each, begin_bytes = FORM.unpack_from(answer)
        plan_end = FORM.size + size
        end = plan_end + begin_bytes
        if has_data:
            compiled = backend.deserialize(self.grammar, answer[end:])
        else:
            compiled = backend.rebuild(self.grammar)
        compiled.plan = answer[FORM.size : plan_end]
        told = Reach(least, fixed, each, answer[plan_end:end])
        compiled.reach = told if least >= 0 else None
        return compiled


class MakeStates(GrammarJob):
    """Make a grammar's table of states by bytes: its `StateTable`."""

    def work(self, backend: Backend | None) -> bytes:
        assert backend is not None
        return byte_states(self.grammar, backend.vocabulary).to_bytes()

    def read(self, backend: Backend | None, answer: bytes) -> StateTable:
        assert backend is not None
        return StateTable.from_bytes(answer, backend.vocabulary.size)


class MakeRoom(GrammarJob):
    """Make the rules that tell how long a grammar's texts are at least: its `RoomRules`."""

    def work(self, backend: Backend | None) -> bytes:  # noqa: ARG002
        grammar, thinking = self.grammar, None
        if grammar.kind == "after_thinking":
            assert grammar.inner is not None
            thinking, grammar = thinking_of(grammar), as_compiled(grammar.inner)
        return room_rules(lower(grammar).plain, thinking).to_bytes()

    def read(self, backend: Backend | None, answer: bytes) -> RoomRules:  # noqa: ARG002
        return RoomRules.from_bytes(answer)


@dataclass(frozen=True)
class Check(GrammarJob):
    """Check an output of a grammar: what `check.violation` returns."""

    text: str

    @property
    def failed(self) -> str:
        return f"the {self.grammar.kind} grammar cannot check its output"

    def work(self, backend: Backend | None) -> bytes:  # noqa: ARG002
        return encode(violation(self.grammar, self.text))

    def read(self, backend: Backend | None, answer: bytes) -> str | None:  # noqa: ARG002
        return msgspec.msgpack.decode(answer, type=str | None)


@dataclass(frozen=True)
class Read(Job):
    """Call what makes a grammar of a client's source, which is pickled: the `Grammar`."""

    call: bytes
    failed = "the grammar cannot be read"

    def work(self, backend: Backend | None) -> bytes:  # noqa: ARG002
        try:
            return encode(pickle.loads(self.call)())
        except RecursionError:
            raise GrammarError("the grammar is nested too deeply") from None
        except UnicodeError as error:
            raise GrammarError(f"the grammar is not valid Unicode: {error}") from None

    def read(self, backend: Backend | None, answer: bytes) -> Grammar:  # noqa: ARG002
        return msgspec.msgpack.decode(answer, type=Grammar)


def as_compiled(grammar: Grammar) -> Grammar:
    """A grammar as a backend gets it: what must differ is left to a matcher."""
    return dataclasses.replace(grammar, apart=grammar.kind in ("json_schema", "json_object"))


def thinking_of(grammar: Grammar) -> Thinking:
    """The thinking of a grammar of kind `after_thinking`."""
    source = json.loads(grammar.source)
    end, begin = source["end"].encode(), (source["begin"] or "").encode()
    return Thinking(end, begin, GAP.encode(), MOST_GAP)


def compile_whole(backend: Backend, grammar: Grammar) -> CompiledGrammar:
    """Compile a grammar, with the plan of what it leaves to a matcher, and its reach.

    Raises:
        GrammarError: as `Backend.compile` and `lowering.to_plan`.
    """
    compiled = backend.compile(grammar)
    compiled.plan = to_plan(grammar)
    # No reason to refuse it: its texts are as long as they are.
    with suppress(GrammarError):
        compiled.reach = reach(lower(grammar).plain)
    return compiled
