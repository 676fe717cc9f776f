"""A grammar backend whose grammars determine how their compile fails; workers import it by name."""

import contextlib
import ctypes
import os
import re
import resource
import socket
import stat
import struct
import threading
import time
from pathlib import Path

import numpy as np

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Matcher
from overlap_spec.grammar.isolation.channel import Word, send
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary

VOCABULARY = Vocabulary((b"a", b"b", b""), 3, (2,))


class Text(CompiledGrammar):
    """A compiled grammar that is just its source, and as large."""

    def __init__(self, source: str, pid: int) -> None:
        self.source, self.pid = source, pid

    @property
    def memory_bytes(self) -> int:
        return len(self.source)

    def matcher(self) -> Matcher:
        raise NotImplementedError

    def serialize(self) -> bytes | None:
        if self.source.startswith("rebuild"):
            return None
        return f"{self.pid} {self.source}".encode()


class FaultyBackend(Backend):
    """`hang`, `eat`, `abort` and the like do that; `slow 0.3` takes that many seconds."""

    name = "faulty"
    warmed_in = 0

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def warm(self) -> None:
        self.warmed_in = os.getpid()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        what, _, rest = grammar.source.partition(" ")
        match what:
            case "hang":
                # Inside one C call that holds the interpreter lock.
                re.match(r"(a+)+b", "a" * 64)
            case "eat":
                _ = [np.ones(2**23, np.uint8) for _ in range(10 * 2**7)]
            case "abort":
                os.write(2, b"a library's last words")
                os.abort()
            case "rust":
                os.write(2, b"memory allocation of 42 bytes failed")
                os.abort()
            case "segfault":
                ctypes.string_at(0)
            case "raise":
                raise RuntimeError("a fault \N{SKULL}" * 5000)
            case "refuse":
                raise GrammarError("$.not: no", "schema")
            case "print":
                print("noise", flush=True)
            case "slow":
                time.sleep(float(rest.split()[0]))
            case "warmed":
                return Text(str(self.warmed_in), os.getpid())
            case "sockets":
                held = [*Path("/proc/self/fd").iterdir()]
                return Text(str(sum(each.is_socket() for each in held)), os.getpid())
            case "masks":
                return Text(str(self.makes_masks), os.getpid())
            case "forge":
                forge(rest.encode("latin-1"))
            case "forge-plan":
                # A grammar that is rebuilt: how long its plan is, that it has no data, its plan.
                forge(b"", struct.pack("<I?", 1, False) + b"]")
            case "swell":
                return Text("x" * int(rest), os.getpid())
        return Text(grammar.source, os.getpid())

    def deserialize(self, grammar: Grammar, data: bytes) -> CompiledGrammar:  # noqa: ARG002
        pid, _, source = data.decode().partition(" ")
        if source == "unreadable":
            raise ValueError("not mine")
        return Text(source, int(pid))

    def rebuild(self, grammar: Grammar) -> CompiledGrammar:
        return Text(grammar.source, os.getpid())


def limit_growth(pid: int, size: int) -> None:
    """Let a process take so many more bytes; processes that it forks later have its limit."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + size
    _, most = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (room, most))


def eat_where_little_is_left(size: int) -> None:
    """Take 4 GiB in a process that can have ``size`` bytes."""
    limit_growth(os.getpid(), size)
    bytes(2**32)


def forge(message: bytes, body: bytes | None = None) -> None:
    """Send a message in the worker's name, or the body of what it has done."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                end = socket.socket(fileno=os.dup(fd))
                if body is None:
                    end.send(message)
                else:
                    send(end, Word(), body)


class Homebound(FaultyBackend):
    """Can only be built in the process that sets `home`."""

    home = 0

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        if os.getpid() != self.home:
            raise RuntimeError("far from home")


class Threaded(FaultyBackend):
    """Starts a thread on construction."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
