"""``overlap-spec batch``: OpenAI's batch lines, answered by the server's own application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from overlap_spec.cli.flags import OUTPUT, with_engine, with_flags
from overlap_spec.config import EngineConfig
from overlap_spec.errors import InvalidRequest, OverlapSpecError, reason
from overlap_spec.server.settings import ServerSettings

if TYPE_CHECKING:
    from httpx import AsyncClient
    from rich.progress import Progress
    from starlette.types import ASGIApp

PARSERS = dict.fromkeys(("tool_call_parser", "reasoning_parser"), OUTPUT)
# Results repeat it.
LONGEST_ID = 256
ANSWERED = 200


@with_engine
@with_flags(ServerSettings, PARSERS)
def batch(
    requests: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="A request a line, as OpenAI's batches.")
    ],
    results: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="A result a line, in the order of ends.")
    ],
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that a line's `model` must be, if it has one.")
    ] = None,
    **flags: Any,
) -> None:
    """Answer a file of requests; the same command goes on after a stop.

    Each line has custom_id, method, url and body; its fault is an error in its own result. The exit
    code is 1 if a line was not answered.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from overlap_spec.doctor import check_files

    lines = count_lines(requests)
    serving = {name: flags.pop(name) for name in PARSERS}
    serving["served_model_name"] = served_model_name
    check_files(EngineConfig.build(**flags))
    run = Run(requests, results, settled(results), 2 * flags["max_running_requests"])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        try:
            asyncio.run(work(run, flags, serving, progress, lines))
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on", highlight=False)
            raise
    kept = f", {len(run.done)} were there" if run.done else ""
    print(f"{run.answered} answered, {run.failed} failed{kept}: {results}")
    if run.failed:
        raise typer.Exit(1)


@dataclass
class Run:
    """One run over a file: what is asked, what is there already, and how it went.

    Attributes:
        done: ``custom_id`` of the results that an earlier run has left.
        at_once: How many lines are under way at once.
    """

    requests: Path
    results: Path
    done: set[str]
    at_once: int
    answered: int = 0
    failed: int = 0
    seen: set[str] = field(default_factory=set)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Number and text of each line of the requests that is not empty."""
        with self.requests.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text

    def read(self, number: int, text: str) -> Line | None:
        """The request of a line; None if an earlier run has answered it.

        Raises:
            BadLine: names the line's number and what is wrong.
        """
        line = read_line(number, text)
        if line.custom_id in self.seen:
            raise BadLine(f"line {number}: custom_id {line.custom_id!r} is there twice", None)
        self.seen.add(line.custom_id)
        return None if line.custom_id in self.done else line

    def keep(self, out: RawIOBase, result: dict[str, Any]) -> None:
        """Count a result, and write it; NotKept where the file does not take it."""
        left = memoryview((json.dumps(result, ensure_ascii=False) + "\n").encode(errors="replace"))
        try:
            while left:
                left = left[out.write(left) or 0 :]
        except OSError as error:
            raise NotKept(
                f"{self.results}: {reason(error)}; make room, and the same command goes on"
            ) from None
        if result["error"] is None and result["response"]["status_code"] == ANSWERED:
            self.answered += 1
        else:
            self.failed += 1


class Line(BaseModel):
    """One request of a batch, as OpenAI has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    body: dict[str, Any]


class NotKept(OverlapSpecError):
    """A result that the file does not take: the disk is full, or a quota is."""


class BadLine(InvalidRequest):
    """A line that is no request; ``custom_id`` if it has a usable one."""

    def __init__(self, message: str, custom_id: str | None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def read_line(number: int, text: str) -> Line:
    """The request of a line; BadLine names its number, and the field and what is wrong with it."""
    name = None
    try:
        data = json.loads(text)
        found = data.get("custom_id") if isinstance(data, dict) else None
        name = found if isinstance(found, str) and 0 < len(found) <= LONGEST_ID else None
        line = Line.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise BadLine(f"line {number}: {place}{first['msg']}", name) from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"line {number}: not JSON: {error}", None) from None
    if line.body.get("stream"):
        raise BadLine(f"line {number}: body.stream: a batch does not stream; leave it out", name)
    return line


def count_lines(path: Path) -> int:
    """Lines of a file that are not empty; InvalidRequest if it cannot be read."""
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise InvalidRequest(f"{path}: {reason(error)}") from None


def settled(path: Path) -> set[str]:
    """The ``custom_id`` of the lines that have been answered; all others leave the file.

    These are failures, which are asked again, and a line that broke off.

    Raises:
        InvalidRequest: the file cannot be read or written, or has something else than results.
    """
    done: dict[str, str] = {}
    try:
        if path.exists():
            # Not splitlines: results have U+2028 and the like as they are.
            texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
            for number, text in enumerate(texts, 1):
                try:
                    name = _settles(text)
                except (ValueError, TypeError, KeyError):
                    if number == len(texts):  # it broke off
                        break
                    raise InvalidRequest(
                        f"{path}: line {number} is no result of a batch, and would be lost: "
                        "name another file for the results"
                    ) from None
                if name is not None:
                    done[name] = text
            fresh = path.with_name(path.name + ".part")
            try:
                fresh.write_text("".join(f"{text}\n" for text in done.values()), encoding="utf-8")
                os.replace(fresh, path)
            finally:
                fresh.unlink(missing_ok=True)
        else:
            path.touch()
    except OSError as error:
        raise InvalidRequest(f"{path}: {reason(error)}") from None
    return set(done)


def _settles(text: str) -> str | None:
    """The ``custom_id`` of a result that is an answer; an error where it is no result."""
    result = json.loads(text)
    name, response = result["custom_id"], result["response"]
    return name if response is not None and response["status_code"] == ANSWERED else None


async def work(
    run: Run, flags: dict[str, Any], serving: dict[str, Any], progress: Progress, count: int
) -> None:
    """Answer all lines of a run, ``run.at_once`` at a time, and write each result as it comes.

    Raises:
        NotKept: a result cannot be written; no further line is answered.
    """
    task = progress.add_task("loading the model", total=None)
    # Without a buffer, which would be written once more when the file is closed.
    with run.results.open("ab", buffering=0) as out:
        async with application(flags, serving) as app, connected(app) as client:
            progress.update(task, description="answering", total=count)
            try:
                await _answer_all(run, client, out, lambda: progress.advance(task))
            except ExceptionGroup as errors:
                full, others = errors.split(NotKept)
                if full is None or others is not None:
                    raise
                # All that were under way have met the same.
                raise NotKept(str(full.exceptions[0])) from None


async def _answer_all(
    run: Run, client: AsyncClient, out: RawIOBase, advance: Callable[[], None]
) -> None:
    waiting = asyncio.Semaphore(run.at_once)

    async def answer(line: Line) -> None:
        try:
            run.keep(out, await result_of(client, line))
        finally:
            waiting.release()
            advance()

    async with asyncio.TaskGroup() as group:
        for number, text in run.lines():
            await waiting.acquire()
            try:
                line = run.read(number, text)
            except BadLine as error:
                run.keep(out, _result(error.custom_id, fault=("invalid_line", str(error))))
                line = None
            if line is not None:
                group.create_task(answer(line))
            else:
                waiting.release()
                advance()


@contextlib.asynccontextmanager
async def application(flags: dict[str, Any], serving: dict[str, Any]) -> AsyncIterator[ASGIApp]:
    """The server's application around a started engine, without a socket."""
    from overlap_spec.async_engine import AsyncEngine
    from overlap_spec.server.app import create_app
    from overlap_spec.server.launch import guess_parser, served_name

    model = flags["model"]
    settings = ServerSettings(
        served_model_name=serving["served_model_name"] or served_name(model),
        tool_call_parser=serving["tool_call_parser"] or guess_parser(model, None),
        reasoning_parser=serving["reasoning_parser"],
        # Nobody waits for an answer: a line takes the time and the memory that it takes.
        request_timeout_s=float("inf"),
        max_front_bytes=sys.maxsize,
    )
    engine = AsyncEngine(max_queued_requests=2**20, **flags)
    app = create_app(engine, settings)
    reader = app.state.service.constraints.reader
    try:
        async with engine:
            reader.warm()
            yield app
    finally:
        await reader.close()


def connected(app: ASGIApp) -> AsyncClient:
    """A client of an application in this process; a line takes the time that it takes."""
    from httpx import ASGITransport, AsyncClient

    # An error that the application did not expect is told as a 500.
    transport = ASGITransport(app, raise_app_exceptions=False)
    return AsyncClient(transport=transport, base_url="http://localhost", timeout=None)


async def result_of(client: AsyncClient, line: Line) -> dict[str, Any]:
    """A line's result in OpenAI's shape."""
    headers = {"Content-Type": "application/json"}
    body = json.dumps(line.body).encode()
    reply = await client.post(line.url, content=body, headers=headers)
    status = reply.status_code
    try:
        answer = json.loads(reply.content)
    except ValueError:
        return _result(line.custom_id, fault=("no_answer", f"HTTP {status} without an answer"))
    response = {"status_code": status, "request_id": answer.get("id"), "body": answer}
    return _result(line.custom_id, response)


def _result(
    name: str | None, response: Any = None, fault: tuple[str, str] | None = None
) -> dict[str, Any]:
    """A line's result; ``fault``: code and message of one without an answer."""
    made = f"batch_req_{uuid.uuid4().hex}"
    error = None if fault is None else {"code": fault[0], "message": fault[1]}
    return {"id": made, "custom_id": name, "response": response, "error": error}
