"""A server that is short of memory, or of room on its disk, says so, and goes on."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from overlap_spec.caches import cache_folder
from tests.support.faulty_backend import limit_growth
from tests.support.serving import Server, wait_for

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
LONG = {"max_new_tokens": 300, "ignore_eos": True}


def limited(kind: int, value: int) -> Callable[[], None]:
    """Sets a limit in a child before it starts."""
    return lambda: resource.setrlimit(kind, (value, value))


@pytest.mark.ci
def test_too_little_address_space_ends_in_a_message() -> None:
    command = [sys.executable, "-m", "overlap_spec", "serve", "--port", "0"]
    done = subprocess.run(
        command,
        capture_output=True,
        timeout=120,
        check=False,
        preexec_fn=limited(resource.RLIMIT_AS, 700 * 2**20),
    )
    # The engine cannot load: the front does not wait for it, nor try for ever.
    assert done.returncode not in (0, None)
    assert b"serving on" not in done.stderr
    assert done.stderr


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two mebibytes, with the compiled kernels; skipped where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=64", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mount: {error}")
    (folder / "overlap-spec").mkdir()
    compiled = cache_folder().glob("kernels-*.so")
    for file in sorted(compiled, key=lambda file: file.stat().st_mtime)[-1:]:
        shutil.copy(file, folder / "overlap-spec")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no byte and no file's entry."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    number = 0
    with contextlib.suppress(OSError):
        while True:
            (folder / f"empty{number}").touch()
            number += 1
    assert os.statvfs(folder).f_bavail == os.statvfs(folder).f_favail == 0


def all_is_served(server: Server, number: int) -> None:
    """Answers, grammars that are new, streams, states."""
    for index in range(3):
        schema = {"properties": {f"p{number}_{index}_{i}": {"type": "null"} for i in range(60)}}
        form = {"type": "json_schema", "json_schema": {"schema": schema | {"type": "object"}}}
        body = {"messages": HI, "response_format": form, "max_tokens": 8}
        assert server.post(CHAT, body).status_code == 200
    choice = {"messages": HI, "structured_outputs": {"choice": ["left", "right"]}}
    reply = server.post(CHAT, choice).json()
    assert reply["choices"][0]["message"]["content"] in ("left", "right")
    stream = {"text": "a", "stream": True, "return_logprob": True, "sampling_params": LONG}
    assert server.post("/generate", stream).text.endswith("data: [DONE]\n\n")
    assert server.post("/tokenize", {"prompt": "hi " * 5000}).json()["count"] > 5000
    # Each refusal is logged with where it was raised.
    assert server.post(CHAT, {"messages": HI, "temperature": -1}).status_code == 400
    for path in ("/health", "/metrics", "/timeline?steps=5", "/server_info"):
        assert server.get(path).status_code == 200, path


def on_disk(folder: Path) -> dict[str, str]:
    """Has a server write to a folder all that it writes."""
    return {"TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.ci
def test_a_full_disk_ends_nothing(disk: Path) -> None:
    log = disk / "log"
    made = Server("--log-level", "debug", more=on_disk(disk), log_file=log)
    try:
        all_is_served(made, 0)
        fill(disk)
        size, pid = log.stat().st_size, made.state()["pid"]
        all_is_served(made, 1)
        # One page at most was left to be written.
        assert log.stat().st_size < size + 4096
        os.kill(pid, signal.SIGKILL)
        # The next engine's socket takes the room that this one's had.
        wait_for(lambda: made.get("/health").status_code == 503, 10)
        wait_for(lambda: made.get("/health").status_code == 200, 90)
        all_is_served(made, 2)
        assert made.terminate() == 0
    finally:
        made.kill()


@pytest.mark.ci
def test_an_engine_past_its_memory_answers_or_starts_again() -> None:
    made = Server()
    try:
        assert made.post(CHAT, {"messages": HI, "max_tokens": 4}).status_code == 200
        pid = made.state()["pid"]
        limit_growth(pid, 2**20)
        logprobs = {"return_logprob": True, "top_logprobs_num": 20}
        body: dict[str, Any] = {"text": "hello " * 1100, "sampling_params": LONG | {"n": 8}}

        def ask(number: int) -> int:
            own = body | logprobs | {"text": f"{number} {body['text']}"}
            return httpx.post(made.url + "/generate", json=own, timeout=120).status_code

        with ThreadPoolExecutor(4) as pool:
            statuses = list(pool.map(ask, range(8)))
            assert made.get("/health").status_code in (200, 503)
        assert set(statuses) <= {200, 429, 500, 503}
        assert set(statuses) & {500, 503}
        wait_for(lambda: made.get("/health").status_code == 200, 90)
        if made.state()["pid"] == pid:
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        all_is_served(made, 0)
        made.settle()
        assert made.terminate() == 0
    finally:
        made.kill()
