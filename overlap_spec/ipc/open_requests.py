"""The requests of a client that are open, and how many each holder has."""

from __future__ import annotations

from overlap_spec.children import OwnProcess
from overlap_spec.errors import (
    GrammarError,
    InvalidRequest,
    OverlapSpecError,
    QueueFull,
    RequestFailed,
)
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.ipc import messages as m
from overlap_spec.ipc.request_handle import AsyncRequestHandle
from overlap_spec.shares import Shares


class OpenRequests(dict[int, AsyncRequestHandle]):
    """The requests to one engine that are open, by their numbers; ``held``: how many each holder
    has; also of those that are being prepared."""

    def __init__(self) -> None:
        super().__init__()
        self._own_process = OwnProcess()
        # Room is made when the engine has said how many requests run at once.
        self.held = Shares(0)

    def check_room(self, holder: str) -> None:
        """Raise QueueFull if a holder may open no further request, and EngineUnavailable in a fork
        of the process that made the client."""
        self._own_process.check()
        held = self.held
        if not held.has_room(holder):
            raise QueueFull(
                f"{held.total} requests are open, {held.held[holder]} of them yours, and "
                f"{held.most} may be (max_running_requests + max_queued_requests): "
                "try again later"
            )

    def add(self, handle: AsyncRequestHandle) -> None:
        """Open a request."""
        self[handle.request.id] = handle
        self.held.add(handle.request.holder)

    def deliver(self, outputs: m.EngineOutputs) -> None:
        """Hand out what the engine sent; of requests that are not open any more nothing."""
        for rejected in outputs.rejected:
            self.fail(rejected.id, _rejection(rejected))
        for number in outputs.queued:
            if number in self:
                self[number].set_queued()
        for piece in outputs.deltas:
            if piece.id in self:
                self[piece.id].push(piece.delta)
        for finished in outputs.finished:
            if (handle := self._close(finished.id)) is not None:
                handle.end(finished.output, finished.error_type)

    def fail(self, number: int, error: OverlapSpecError) -> None:
        """Close a request that has no output."""
        if (handle := self._close(number)) is not None:
            handle.fail(error)

    def _close(self, number: int) -> AsyncRequestHandle | None:
        handle = self.pop(number, None)
        if handle is not None:
            self.held.add(handle.request.holder, -1)
        return handle


def _rejection(rejected: m.RejectedRequest) -> OverlapSpecError:
    """The error that the engine's process raised."""
    if rejected.failure is not None:
        return CompileFailure(rejected.message, rejected.failure, rejected.param)
    kinds = {kind.__name__: kind for kind in (GrammarError, InvalidRequest)}
    if rejected.error_type in kinds:
        return kinds[rejected.error_type](rejected.message, rejected.param)
    return RequestFailed(rejected.message)
