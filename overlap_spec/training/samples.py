"""A user's training file: one chat or text a line, read with the target's tokenizer."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_spec.errors import ConfigError, InvalidRequest, reason
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.training.batches import PROMPT_WEIGHT, Row

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Sample:
    """One line of the file in tokens.

    Attributes:
        row: Ids, and loss weights: 1 on answers and on texts, 0.1 on all else.
        prompt: How many of the ids come before the last answer; of a text, half of them.
    """

    row: Row
    prompt: int


def read_samples(
    path: Path, tokenizer: Tokenizer, max_length: int, answered: bool
) -> tuple[list[Sample], int]:
    """The lines of a ``.jsonl`` file, each cut at ``max_length`` tokens, and how many lines were
    left out because nothing to learn from stands before that.

    A line is an object with ``messages`` (a chat, with ``tools`` if there are any) or ``text``;
    other fields are not read.

    Args:
        answered: Chats must end with an answer. Otherwise one that ends with a question is a
            prompt, and the last answer of any other serves no purpose but to be cut off.

    Raises:
        ConfigError: the file or a line cannot be read; it names line and field.
    """
    samples, left_out = [], 0
    for number, line in _lines(path):
        try:
            sample = _sample(_object(line), tokenizer, answered)
        except InvalidRequest as error:
            where = f"{error.param}: " if error.param else ""
            raise ConfigError(f"{path}:{number}: {where}{error}") from None
        (ids, weights), prompt = sample.row, sample.prompt
        if prompt < max_length and len(ids) > 1:
            row = array("i", ids[:max_length]), array("f", weights[:max_length])
            samples.append(Sample(row, prompt))
        else:
            left_out += 1
    if len(samples) < 2:
        raise ConfigError(
            f"{path}: {len(samples)} of its lines can be used, and two are the least, one of them "
            f"for the check at the end; {left_out} have no answer within max_length = {max_length}"
        )
    return samples, left_out


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from None


def _object(line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest("an object with messages or text is expected")
    return data


def _sample(data: Mapping[str, Any], tokenizer: Tokenizer, answered: bool) -> Sample:
    if ("messages" in data) == ("text" in data):
        found = ", ".join(sorted(data)) or "none"
        raise InvalidRequest(f"either messages or text is expected; its fields: {found}")
    if "text" in data:
        if not isinstance(data["text"], str):
            raise InvalidRequest("must be a string", "text")
        ids = tokenizer.encode(data["text"], special=True)
        return Sample((ids, [1.0] * len(ids)), max(1, len(ids) // 2))
    messages, tools = _messages(data["messages"]), data.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequest("must be a list", "tools")
    if messages[-1]["role"] == "assistant":
        return _chat(messages, tools, tokenizer)
    if answered:
        raise InvalidRequest(
            f"the last one is of {messages[-1]['role']!r}, so there is no answer to learn from; "
            "own_answers lets the target answer",
            "messages",
        )
    ids = tokenizer.chat(messages, tools)
    return Sample((ids, [PROMPT_WEIGHT] * len(ids)), len(ids))


def _messages(messages: Any) -> list[Mapping[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("must be a list of messages", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidRequest("must be an object with role and content", where)
        if message.get("role") not in ROLES:
            raise InvalidRequest(f"must be one of {', '.join(ROLES)}", f"{where}.role")
        calls = message["role"] == "assistant" and bool(message.get("tool_calls"))
        if not isinstance(message.get("content"), str) and not calls:
            raise InvalidRequest("must be a string", f"{where}.content")
    if messages[0]["role"] == "assistant":
        raise InvalidRequest("a chat cannot begin with an answer", "messages[0].role")
    return messages


def _chat(
    messages: list[Mapping[str, Any]], tools: list[Any] | None, tokenizer: Tokenizer
) -> Sample:
    """A chat whose answers are learnt: every one that the whole chat's text keeps as it was."""
    whole = tokenizer.render(messages, tools, open_answer=False)
    ids: list[int] = []
    weights: list[float] = []
    done = prompt = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.render(messages[:turn], tools)
        after = tokenizer.render(messages[: turn + 1], tools, open_answer=False)
        last = turn == len(messages) - 1
        if whole.startswith(before) and whole.startswith(after) and len(after) > len(before):
            pieces = ((whole[done : len(before)], PROMPT_WEIGHT), (after[len(before) :], 1.0))
            done = len(after)
        elif last:
            raise InvalidRequest(
                "the model's template does not write this answer behind its own prompt; "
                "own_answers lets the target answer",
                f"messages[{turn}]",
            )
        else:
            # Some templates drop parts of earlier answers, such as their thinking.
            continue
        for (text, weight), is_answer in zip(pieces, (False, True), strict=True):
            if last and is_answer:
                prompt = len(ids)
            piece = tokenizer.encode(text)
            ids += piece
            weights += [weight] * len(piece)
    return Sample((ids, weights), prompt)
