"""A worker process: does the jobs that it receives, one after the other.

The server forks it with the library loaded and the vocabulary built, and without threads. Its
standard output and error go to a memory file, which the server reads when it ends.
"""

from __future__ import annotations

import errno
import pickle
import resource
import socket
from pathlib import Path

from overlap_spec.children import can_take, limit_self
from overlap_spec.errors import GrammarError
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation.channel import Order, Word, read, receive, send
from overlap_spec.grammar.isolation.jobs import means_out_of_memory
from overlap_spec.grammar.isolation.limits import CompileLimits, Failed, out_of_memory

# Longest message of an error: well under a header's own limit.
MESSAGE_CHARACTERS = 6000
# A worker that still holds more than this share of its limit is replaced after its job.
KEPT_SHARE = 1 / 8
# Of its limit, what a worker takes for itself after a job has failed.
SLACK_BYTES = 2**22


def serve(end: socket.socket, backend: Backend | None, limits: CompileLimits) -> None:
    """Serve until the other side closes, or this process has to be replaced."""
    baseline = _private_bytes()
    most_bytes = baseline + limits.memory_bytes
    limit_self(resource.RLIMIT_DATA, most_bytes)
    limit_self(resource.RLIMIT_FSIZE, limits.result_bytes)
    limit_self(resource.RLIMIT_CORE, 0)
    # If the machine runs out of memory, the kernel should kill this process, not the engine.
    Path("/proc/self/oom_score_adj").write_text("1000")
    goes_on = True
    while goes_on and (found := receive(end, Order)) is not None:
        assert found[1] is not None
        try:
            body = pickle.loads(read(found[1])).work(backend)
            goes_on = _private_bytes() < baseline + limits.memory_bytes * KEPT_SHARE
            send(end, Word(goes_on=goes_on), body)
            del body
        except GrammarError as error:
            param = error.param and _sendable(error.param)
            send(end, Word(failed="refused", reason=_sendable(error), param=param, goes_on=True))
        except Exception as error:
            goes_on, cause = False, _cause(error, most_bytes, limits)
            send(end, Word(failed=cause.kind, reason=_sendable(cause)))


def _sendable(text: object) -> str:
    return str(text)[:MESSAGE_CHARACTERS].encode(errors="replace").decode()


def _private_bytes() -> int:
    """Private writable memory of this process in bytes, which RLIMIT_DATA limits.

    Unlike the address space, it excludes memory that is reserved but never touched.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData")


def _cause(error: Exception, most_bytes: int, limits: CompileLimits) -> Failed:
    """Why a job failed; this process may have ``most_bytes``."""
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        most = limits.result_bytes / 2**20
        return Failed("out_of_memory", f"its compiled form takes more than {most:g} MiB")
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, MemoryError) and not means_out_of_memory(text):
        return Failed("crash", text)
    # Its own limit was met if this process could still grow to it; else the machine's.
    has = can_take(most_bytes - _private_bytes() - SLACK_BYTES)
    return out_of_memory(limits, is_its_own=has)
