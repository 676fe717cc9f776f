"""The process that forks workers.

It loads the grammar library and builds the backend once; a fork has both immediately, while a new
process would need seconds. It does no job and has no threads, so forking is safe. As the parent
of all workers it alone kills and reaps them, so that a reused process id is never mistaken.

`main` runs in a new interpreter with the arguments `SOCKET SETUP PARENT [full]`: file descriptors
of its end of the channel and of a pickled `Setup`, and the process id of the engine.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
from types import FrameType
from typing import NamedTuple

from overlap_spec.children import can_take, end_with
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation import worker
from overlap_spec.grammar.isolation.channel import Message, receive, send
from overlap_spec.grammar.isolation.import_stubs import import_light
from overlap_spec.grammar.isolation.limits import CompileLimits
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary

STDERR_BYTES = 2000
# Libraries handle these to print a trace, which can take seconds.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class Setup(NamedTuple):
    """What a fork server builds, and the limits of its workers; without a vocabulary no backend."""

    module: str
    name: str
    vocabulary: Vocabulary | None
    limits: CompileLimits


class ForkedWorker(NamedTuple):
    """A forked worker: its number, its socket, and the descriptor of the file with its output."""

    number: int
    end: socket.socket
    output: int


class ForkServer:
    """Forks, kills and reaps workers on request."""

    def __init__(self, end: socket.socket, backend: Backend | None, limits: CompileLimits) -> None:
        self.end, self.backend, self.limits = end, backend, limits
        self.workers: dict[int, ForkedWorker] = {}
        self.wake_reader, self.wake_writer = socket.socketpair()
        for wake in (self.wake_reader, self.wake_writer):
            wake.setblocking(False)

    def run(self) -> None:
        """Serve until the engine closes the channel, then kill all workers."""
        signal.set_wakeup_fd(self.wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        selector = selectors.DefaultSelector()
        selector.register(self.end, selectors.EVENT_READ)
        selector.register(self.wake_reader, selectors.EVENT_READ)
        send(self.end, event="ready")
        try:
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self.end:
                        message = receive(self.end)
                        if message is None:
                            return
                        self.obey(message)
                    else:
                        self.wake_reader.recv(4096)
                        self.reap()
        finally:
            for pid in self.workers:
                os.kill(pid, signal.SIGKILL)

    def obey(self, message: Message) -> None:
        """Carry out a request: fork a worker for the attached socket, or kill or slow one."""
        order, number = message.header["order"], int(message.header["number"])
        if order == "fork":
            self.fork(number, socket.socket(fileno=message.fd))
            return
        pid = next((pid for pid, one in self.workers.items() if one.number == number), None)
        if pid is not None and order == "kill":
            os.kill(pid, signal.SIGKILL)
        elif pid is not None:
            _slow(
                pid, os.getpriority(os.PRIO_PROCESS, 0) - self.limits.nice + self.limits.long_nice
            )

    def fork(self, number: int, end: socket.socket) -> None:
        """Fork worker `number`, which serves the socket `end`."""
        output, parent = os.memfd_create("output"), os.getpid()
        pid = os.fork()
        if pid == 0:
            self.become_worker(end, output, parent)
        self.workers[pid] = ForkedWorker(number, end, output)

    def become_worker(self, end: socket.socket, output: int, parent: int) -> None:
        """The child's side of a fork; does not return."""
        status = 1
        try:
            end_with(parent)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *CRASHES):
                signal.signal(number, signal.SIG_DFL)
            # What is others' is not for one that may be in other hands.
            others = [one.end for one in self.workers.values()]
            for other in (self.end, self.wake_reader, self.wake_writer, *others):
                other.close()
            os.dup2(output, 1)
            os.dup2(output, 2)
            worker.serve(end, self.backend, self.limits)
            status = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(status)

    def reap(self) -> None:
        """Tell how workers have ended, each on its own socket, behind what it has said."""
        while self.workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended = self.workers.pop(pid)
            size = os.fstat(ended.output).st_size
            tail = os.pread(ended.output, STDERR_BYTES, max(0, size - STDERR_BYTES))
            os.close(ended.output)
            # Whoever listened may have gone, and one that nobody listens to may have filled it.
            with ended.end, contextlib.suppress(OSError):
                send(
                    ended.end,
                    answer="ended",
                    code=os.waitstatus_to_exitcode(status),
                    message=tail.decode(errors="replace"),
                    has_room=can_take(self.limits.memory_bytes),
                )


def _slow(pid: int, nice: int) -> None:
    """Set the niceness of all threads of a process."""
    # A thread or the whole process may end meanwhile.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def _ignore(_signal: int, _frame: FrameType | None) -> None:
    """Handle a signal that only has to wake the loop."""


def build(setup: Setup, light: bool) -> Backend | None:
    """Import and build what workers are forked with.

    Args:
        setup: What to build.
        light: Import with stubs in place of heavy modules.

    Raises:
        RuntimeError: the library started threads, so that forking is not safe.
    """
    if setup.vocabulary is None:
        # Imports what reading a source needs.
        Grammar.json_schema("{}")
        return None
    module = import_light(setup.module) if light else importlib.import_module(setup.module)
    backend = getattr(module, setup.name)(setup.vocabulary)
    assert isinstance(backend, Backend)
    backend.warm()
    # Computed before the fork, so that workers share them: what tables of states look tokens up in,
    # and rows.
    _ = backend.vocabulary.by_text, setup.vocabulary.text_row, setup.vocabulary.stop_row
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{setup.module}:{setup.name} started {threads - 1} threads")
    return backend


def main(arguments: list[str]) -> None:
    """Entry point of the process."""
    end_with(int(arguments[2]))
    end = socket.socket(fileno=int(arguments[0]))
    with os.fdopen(int(arguments[1]), "rb", closefd=False) as file:
        file.seek(0)
        setup: Setup = pickle.load(file)
    # Only the project's own backends are known to work with stubs.
    light = len(arguments) == 3 and setup.module.startswith("overlap_spec.")
    Backend.makes_masks = False
    try:
        backend = build(setup, light)
    except Exception as error:
        if light:
            os.execv(sys.executable, [*sys.orig_argv, "full"])
        text = f"{type(error).__name__}: {error}"[: worker.MESSAGE_CHARACTERS]
        send(end, event="broken", message=text)
        return
    gc.collect()
    gc.freeze()
    # Not earlier: a request waits for the first grammar.
    os.nice(setup.limits.nice)
    ForkServer(end, backend, setup.limits).run()
    os._exit(0)  # Nothing has to be cleaned up, and the engine waits.
