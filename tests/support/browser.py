"""A headless Chromium for tests, spoken to over a pipe in the DevTools protocol."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
ANSWER_S = 60.0


class Browser:
    """One tab in a browser of its own.

    Args:
        profile: An empty folder.
        size: Of the window, in CSS pixels.

    Attributes:
        events: What the tab has told so far, beside answers: ``method`` and ``params``.
    """

    def __init__(self, profile: Path, size: tuple[int, int] = (1200, 1000)) -> None:
        assert CHROMIUM is not None
        self.events: list[dict[str, Any]] = []
        self._number, self._rest, self._session = 0, b"", ""
        theirs_in, self._out, self._in, theirs_out = map(_moved, (*os.pipe(), *os.pipe()))
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        command += [f"--window-size={size[0]},{size[1]}", "about:blank"]
        quiet = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        pipes = [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
        self._pid = os.posix_spawn(
            CHROMIUM, command, os.environ, file_actions=[*pipes, quiet], setpgroup=0
        )
        os.close(theirs_in)
        os.close(theirs_out)
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while (answer := self._read(deadline)).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def evaluate(self, script: str) -> Any:
        """The value of a script's last expression, awaited."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState == 'complete' && location.href == {json.dumps(url)}")

    def wait(self, condition: str, timeout_s: float = ANSWER_S) -> None:
        """Wait until an expression is true of the page."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(f"!!({condition})"):
            assert time.monotonic() < deadline, f"it did not happen in time: {condition}"
            time.sleep(0.05)

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """Press and release a key; ``modifiers`` is 2 for Ctrl, 8 for Shift."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=modifiers,
            )

    def told(self, method: str) -> list[dict[str, Any]]:
        """Parameters of all events of a kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def close(self) -> None:
        """End the browser and everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._out)
        os.close(self._in)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "the browser has ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _moved(end: int) -> int:
    """A pipe's end under a number above 4: the browser has 3 and 4 for its own."""
    high = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(end)
    return high
