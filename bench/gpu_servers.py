"""The part of ``bench.gpu`` that holds the engine against vLLM and SGLang, where they are.

Each serves the same target by itself, as its users start it: no drafts, its own choice of grammar
backend, no prefix cache, like the engine it is held against. It takes the requests over HTTP.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import httpx

from bench import peers
from bench.client import ServerSystem
from bench.gpu_compare import Contest, compete, drafting
from bench.gpu_setup import Context, Result
from overlap_spec.errors import OverlapSpecError

POLL_S, ENDING_S = 0.5, 30.0
MEMORY_SHARE = "0.8"


class ServerFailed(OverlapSpecError):
    """A server ended, or did not answer in time."""


class Peer(NamedTuple):
    """A server: its package, and how it is started for a folder and a port."""

    name: str
    module: str
    flags: Callable[[Path, int], list[str]]


PEERS = (
    Peer(
        "vllm",
        "vllm.entrypoints.openai.api_server",
        lambda target, port: [
            "--model", str(target), "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "bfloat16", "--gpu-memory-utilization", MEMORY_SHARE,
            "--no-enable-prefix-caching",
        ],
    ),
    Peer(
        "sglang",
        "sglang.launch_server",
        lambda target, port: [
            "--model-path", str(target), "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "bfloat16", "--mem-fraction-static", MEMORY_SHARE, "--disable-radix-cache",
        ],
    ),
)  # fmt: skip


def servers(context: Context) -> Result:
    """Speed over each server that is installed, at the batch sizes of ``bench.peers``."""
    there = [peer for peer in PEERS if find_spec(peer.name) is not None]
    missing = [peer.name for peer in PEERS if peer not in there]
    if not there:
        return Result(details={"missing": missing})
    chain, tree = context.engines("chain", "tree")
    contest = compete(context, drafting(chain, tree), min(3, context.size.repetitions))
    # A server takes most of the device's memory.
    context.engines()
    found = Result(details={"missing": missing}, samples=contest.run.samples)
    for peer in there:
        try:
            with serving(peer, context.setup.target, context.left_s) as url:
                ask(contest, peer.name, ServerSystem(url))
        except ServerFailed as error:
            found.faults.append(str(error))
            continue
        speedup, ratios = contest.speedup(peer.name, None)
        found.figures[f"{peer.name}_speedup"] = speedup
        found.details[f"{peer.name}_ratios"] = ratios
        found.details |= peers.summary(contest.run.samples)
        context.keep(found)
    return found


def ask(contest: Contest, name: str, system: ServerSystem) -> None:
    """The contest's requests, as often as the others had them, after once uncounted."""
    peers.ask_all({name: system}, peers.make_tasks(contest.run.options), contest.run)


@contextmanager
def serving(peer: Peer, target: Path, most_s: float) -> Iterator[str]:
    """The address of a server that answers; it is ended then.

    Raises:
        ServerFailed: it ended, or did not answer within ``most_s``; with the end of its log.
    """
    port, ends_s = free_port(), time.monotonic() + most_s
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        command = [sys.executable, "-m", peer.module, *peer.flags(target, port)]
        # In the part's own group of processes: what ends the part ends the server's too.
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not answers(url):
                ended = process.poll() is not None
                if ended or time.monotonic() > ends_s:
                    log.seek(0)
                    last = " ".join(log.read().splitlines()[-3:])
                    how = f"ended with {process.returncode}" if ended else "does not answer"
                    raise ServerFailed(f"{peer.name} {how}: {last}")
                time.sleep(POLL_S)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Whether a model is served there."""
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
