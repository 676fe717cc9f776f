"""What a worker process does: compile the grammars that it is sent, and check outputs.

It is forked from the template, which has the library loaded and the vocabulary built in, and has
no threads. Its output goes to a file in memory that the template reads when it dies.
"""

from __future__ import annotations

import ctypes
import errno
import pickle
import resource
import signal
import socket
from pathlib import Path

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation.channel import read_body, receive, send, send_body
from overlap_spec.grammar.isolation.check import violation

# Python's limit on a message that goes into a header, well under the header's own.
MESSAGE_CHARACTERS = 8000
# A worker that holds on to more of its limit than this share is replaced after its compile.
KEPT_SHARE = 1 / 8
PR_SET_PDEATHSIG = 1
# How libraries say that memory ran out, in an error or on standard error as they abort.
OUT_OF_MEMORY = (
    "bad_alloc",
    "memory allocation of",
    "out of memory",
    "cannot allocate memory",
    "resource temporarily unavailable",
)


def die_with_parent() -> None:
    """Have the system end this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def means_out_of_memory(text: str) -> bool:
    """Whether an error's text speaks of memory."""
    return any(mark in text.lower() for mark in OUT_OF_MEMORY)


def private_bytes() -> int:
    """Private writable memory of this process, which is what RLIMIT_DATA bounds.

    Unlike the address space, it leaves out what allocators and threads reserve but never touch.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData")


def serve(end: socket.socket, backend: Backend, memory_bytes: int, result_bytes: int) -> None:
    """Compile and check until the other side hangs up, or this process is not as good as new."""
    baseline = private_bytes()
    limit = baseline + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (result_bytes, result_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where the whole machine runs out, the system should end this process and not the engine.
    Path("/proc/self/oom_score_adj").write_text("1000")
    while (message := receive(end)) is not None:
        send(end, answer="started")
        if not _work(end, backend, read_body(message), baseline + memory_bytes * KEPT_SHARE):
            return


def _work(end: socket.socket, backend: Backend, job: bytes, most_bytes: float) -> bool:
    """Compile or check, and answer; whether this process may go on."""
    try:
        grammar, text = pickle.loads(job)
        if text is not None:
            found = violation(grammar, text)
            goes_on = private_bytes() < most_bytes
            send(end, answer="checked", violation=found, goes_on=goes_on)
            return goes_on
        compiled = backend.compile(grammar)
        body = compiled.serialize()
        del compiled
        goes_on = private_bytes() < most_bytes
        if body is None:
            send(end, answer="rebuild", goes_on=goes_on)
        else:
            send_body(end, body, answer="compiled", goes_on=goes_on)
    except GrammarError as error:
        if not means_out_of_memory(str(error)):
            text = str(error)[:MESSAGE_CHARACTERS]
            send(end, answer="refused", message=text, param=error.param, goes_on=True)
            return True
        send(end, answer="out_of_memory", goes_on=False)
        return False
    except MemoryError:
        send(end, answer="out_of_memory", goes_on=False)
        return False
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
        answer = "out_of_memory" if means_out_of_memory(text) else "crash"
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            answer = "too_large"
        send(end, answer=answer, message=text, goes_on=False)
        return False
    return goes_on
