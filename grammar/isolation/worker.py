"""A worker process: does the jobs that it receives, one after the other.

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
from typing import Literal

import msgspec

from overlap_spec.children import can_take, limit_self
from overlap_spec.errors import GrammarError
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation.channel import (
    Message,
    drop_body,
    read_body,
    receive,
    send,
    send_body,
)
from overlap_spec.grammar.isolation.jobs import means_out_of_memory
from overlap_spec.grammar.isolation.limits import CompileLimits

# Longest message of an error, and longest field that it names: well under a header's own limit.
MESSAGE_CHARACTERS, PARAM_CHARACTERS = 6000, 1000
# A worker that still holds more than this share of its limit is replaced after its job.
KEPT_SHARE = 1 / 8
# Of its limit, what a worker takes for itself after a job has failed.
SLACK_BYTES = 2**22


class Answer(msgspec.Struct, frozen=True):
    """The header of a worker's message, or, ``ended``, of its fork server's behind the last one.

    Attributes:
        answer: ``done`` comes with a body.
        pid: Of the worker that has started on a job.
        goes_on: Whether the worker takes another job.
        message, param: Of an error; what an ended worker wrote.
        code: An exit status, or a signal below 0.
        has_room: The machine had memory for one more such worker as it ended.
    """

    answer: Literal[
        "started", "done", "refused", "out_of_memory", "no_memory", "too_large", "crash", "ended"
    ]
    pid: int = 0
    goes_on: bool = False
    message: str = ""
    param: str | None = None
    code: int = 0
    has_room: bool = True


def read_answer(message: Message, starts: bool) -> Answer:
    """The answer in a message, which tells that a worker has started on its job, or of its end.

    Raises:
        ValueError: no worker of ours answers so; the message's body is closed.
    """
    try:
        answer = msgspec.convert(message.header, Answer)
        if answer.answer != "ended" and (answer.answer == "started") != starts:
            raise ValueError(f"{answer.answer}, which it was not asked for")
        if (message.fd >= 0) != (answer.answer == "done"):
            raise ValueError(f"{answer.answer} with a body or without one")
    except (msgspec.ValidationError, ValueError) as error:
        drop_body(message)
        raise ValueError(str(error)) from None
    return answer


def private_bytes() -> int:
    """Private writable memory of this process in bytes, which RLIMIT_DATA limits.

    Unlike the address space, it excludes memory that is reserved but never touched.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData")


def serve(end: socket.socket, backend: Backend | None, limits: CompileLimits) -> None:
    """Serve until the other side closes, or this process has to be replaced."""
    baseline = private_bytes()
    limit_self(resource.RLIMIT_DATA, baseline + limits.memory_bytes)
    limit_self(resource.RLIMIT_FSIZE, limits.result_bytes)
    limit_self(resource.RLIMIT_CORE, 0)
    # If the machine runs out of memory, the kernel should kill this process, not the engine.
    Path("/proc/self/oom_score_adj").write_text("1000")
    kept_bytes = baseline + limits.memory_bytes * KEPT_SHARE
    while (message := receive(end)) is not None:
        send(end, answer="started", pid=os.getpid())
        try:
            body = pickle.loads(read_body(message)).work(backend)
            goes_on = private_bytes() < kept_bytes
            send_body(end, body, answer="done", goes_on=goes_on)
            del body
        except GrammarError as error:
            param = error.param and error.param[:PARAM_CHARACTERS]
            text, goes_on = str(error)[:MESSAGE_CHARACTERS], True
            send(end, answer="refused", message=text, param=param, goes_on=True)
        except Exception as error:
            text, goes_on = f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS], False
            answer = _cause(error, text, baseline + limits.memory_bytes)
            send(end, answer=answer, message=text)
        if not goes_on:
            return


def _cause(error: Exception, text: str, most_bytes: int) -> str:
    """What the answer to a job that failed is called; this process may have ``most_bytes``."""
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "too_large"
    if not isinstance(error, MemoryError) and not means_out_of_memory(text):
        return "crash"
    # Its own limit was met if this process could still grow to it; else the machine's.
    has = can_take(most_bytes - private_bytes() - SLACK_BYTES)
    return "out_of_memory" if has else "no_memory"
