"""A worker process: compiles the grammars that it receives, and checks outputs.

The fork server forks it with the library loaded and the vocabulary built, and without threads. Its
standard output and error go to a memory file, which the fork server reads when it ends.
"""

from __future__ import annotations

import errno
import os
import pickle
import resource
import socket
from pathlib import Path

from overlap_spec.children import can_take, limit_self
from overlap_spec.errors import GrammarError
from overlap_spec.grammar.byte_states import byte_states
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation.channel import read_body, receive, send, send_body
from overlap_spec.grammar.isolation.check import violation
from overlap_spec.grammar.isolation.executor import compile_whole

# Longest error message in a header, well under the header's own limit.
MESSAGE_CHARACTERS = 8000
# Longest plan in a header.
PLAN_BYTES = 40_000
# A worker that still holds more than this share of its limit is replaced after its compile.
KEPT_SHARE = 1 / 8
# Of its limit, what a worker takes for itself after a compile has failed.
SLACK_BYTES = 2**22
# How libraries report that memory ran out, in an error or on standard error.
OUT_OF_MEMORY = (
    "bad_alloc",
    "memory allocation of",
    "out of memory",
    "cannot allocate memory",
    "resource temporarily unavailable",
)


def means_out_of_memory(text: str) -> bool:
    """Whether an error's text reports that memory ran out."""
    return any(mark in text.lower() for mark in OUT_OF_MEMORY)


def private_bytes() -> int:
    """Private writable memory of this process in bytes, which RLIMIT_DATA limits.

    Unlike the address space, it excludes memory that is reserved but never touched.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData")


def serve(end: socket.socket, backend: Backend, memory_bytes: int, result_bytes: int) -> None:
    """Serve until the other side closes, or this process has to be replaced."""
    baseline = private_bytes()
    limit_self(resource.RLIMIT_DATA, baseline + memory_bytes)
    limit_self(resource.RLIMIT_FSIZE, result_bytes)
    limit_self(resource.RLIMIT_CORE, 0)
    # If the machine runs out of memory, the kernel should kill this process, not the engine.
    Path("/proc/self/oom_score_adj").write_text("1000")
    while (message := receive(end)) is not None:
        send(end, answer="started", pid=os.getpid())
        if not _work(end, backend, read_body(message), baseline, memory_bytes):
            return


def _work(
    end: socket.socket, backend: Backend, item: bytes, baseline: int, memory_bytes: int
) -> bool:
    """Compile or check, and send the result; False if this process has to be replaced."""
    most_bytes = baseline + memory_bytes * KEPT_SHARE
    try:
        grammar, text, states = pickle.loads(item)
        if states:
            table = byte_states(grammar, backend.vocabulary).to_bytes()
            goes_on = private_bytes() < most_bytes
            send_body(end, table, answer="states", goes_on=goes_on)
            return goes_on
        if text is not None:
            found = violation(grammar, text)
            goes_on = private_bytes() < most_bytes
            send(end, answer="checked", violation=found, goes_on=goes_on)
            return goes_on
        compiled = compile_whole(backend, grammar)
        body, plan = compiled.serialize(), compiled.plan.decode()
        del compiled
        if len(plan) > PLAN_BYTES:
            reason = "uniqueItems or minProperties stands in too many places"
            raise GrammarError(reason, grammar.kind)
        goes_on = private_bytes() < most_bytes
        if body is None:
            send(end, answer="rebuild", plan=plan, goes_on=goes_on)
        else:
            send_body(end, body, answer="compiled", plan=plan, goes_on=goes_on)
    except GrammarError as error:
        if not means_out_of_memory(str(error)):
            text = str(error)[:MESSAGE_CHARACTERS]
            send(end, answer="refused", message=text, param=error.param, goes_on=True)
            return True
        answer, text = _whose_memory(baseline + memory_bytes), ""
    except MemoryError:
        answer, text = _whose_memory(baseline + memory_bytes), ""
    except Exception as error:
        answer, text = "crash", f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
        if means_out_of_memory(text):
            answer = _whose_memory(baseline + memory_bytes)
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            answer = "too_large"
    else:
        return goes_on
    send(end, answer=answer, message=text, goes_on=False)
    return False


def _whose_memory(most_bytes: int) -> str:
    """`out_of_memory` if this process could still grow to its own limit, so that it was this one
    that was met; `no_memory` if the machine does not give it that much."""
    has = can_take(most_bytes - private_bytes() - SLACK_BYTES)
    return "out_of_memory" if has else "no_memory"
