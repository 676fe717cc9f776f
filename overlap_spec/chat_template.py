"""Chat templates, which come with checkpoints and are not to be trusted: a sandbox with limits.

A template cannot reach Python's internals (Jinja's sandbox), loop or recurse for longer than
``MOST_S`` or ``MOST_TICKS`` turns, or make a text of over ``MOST_CHARACTERS`` besides its input's.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from overlap_spec.errors import CheckpointError, InvalidRequest

Message = Mapping[str, Any]
# Loops and calls of one rendering, and its time.
MOST_TICKS, MOST_S = 10**6, 2.0
# Of a text, list or number's digits that an expression makes.
MOST_CHARACTERS = 2**24
# Widths, counts and the like that are given to functions and filters.
MOST_WIDTH = 10**5
SAMPLE = ({"role": "user", "content": "Hello"},)
# Variables that every rendering sets.
OWN_VARIABLES = {"messages", "tools", "add_generation_prompt"}
# Filters that repeat by a number.
REPEATING = ("batch", "center", "indent", "slice", "tojson", "truncate", "wordwrap")


@dataclass(frozen=True)
class Rendering:
    """How a chat becomes a prompt.

    Attributes:
        open_answer: Add the start of the model's answer.
        continues: End inside the last message, an assistant's, which the model goes on with; no
            answer is opened.
        variables: Values for the template's own switches, such as ``enable_thinking``; those that
            it does not read are left out.
    """

    open_answer: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """A checkpoint's chat template.

    Args:
        text: Jinja's source.
        variables: What every rendering has, such as ``bos_token``.

    Attributes:
        switches: Names of the variables that it reads besides the chat's own.

    Raises:
        CheckpointError: it cannot be compiled, or fails at a chat of one message; a template that
            refuses such a chat by itself (``raise_exception``) is fine.
    """

    def __init__(self, text: Any, variables: Mapping[str, Any]) -> None:
        if not isinstance(text, str):
            raise CheckpointError(f"chat_template must be text: {type(text).__name__}")
        self._environment, self._variables = Environment(), dict(variables)
        try:
            self._template = self._environment.from_string(text)
            read = meta.find_undeclared_variables(self._environment.parse(text))
        except jinja2.TemplateSyntaxError as error:
            message = f"chat_template, line {error.lineno}: {error.message}"
            raise CheckpointError(message) from None
        except Exception as error:
            raise CheckpointError(f"chat_template: {_said(error)}") from None
        known = OWN_VARIABLES | set(variables) | set(self._environment.globals)
        self.switches = frozenset(read - known)
        try:
            self._render(SAMPLE, None, Rendering())
        except Refused:
            return
        except Exception as error:
            raise CheckpointError(
                f"chat_template fails at a chat of one message: {_said(error)}"
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        rendering: Rendering = Rendering(),
    ) -> str:
        """The text of a chat. InvalidRequest: the template refuses the messages, or fails at them;
        or the last message cannot be continued."""
        mark = ""
        if rendering.continues:
            # What the template writes behind the last message's text is left out.
            mark = f"\N{OBJECT REPLACEMENT CHARACTER}{secrets.token_hex(16)}"
            messages = [*messages[:-1], _marked(messages, mark)]
        text = self._guarded(messages, tools, rendering)
        if not mark:
            return text
        text, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidRequest(
                "the last message cannot be continued: the chat template does not write it as it "
                "is",
                "messages",
            )
        return text

    def _guarded(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, rendering: Rendering
    ) -> str:
        try:
            return self._render(messages, tools, rendering)
        except Refused as error:
            raise InvalidRequest(f"the chat template refuses: {error}", "messages") from None
        except Exception as error:
            message = f"the chat template fails at these messages: {_said(error)}"
            raise InvalidRequest(message, "messages") from None

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, rendering: Rendering
    ) -> str:
        own = {
            **{name: v for name, v in rendering.variables.items() if name in self.switches},
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": rendering.open_answer and not rendering.continues,
        }
        limits = Limits()
        return "".join(
            limits.texts(self._template.generate(**self._variables, **own, limits_=limits))
        )


class Refused(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class Limits:
    """What is left to one rendering."""

    def __init__(self) -> None:
        self._ticks, self._end_s = 0, time.monotonic() + MOST_S
        self._characters = 0

    def tick(self) -> None:
        """Count a turn of a loop or a call."""
        self._ticks += 1
        if self._ticks > MOST_TICKS or time.monotonic() > self._end_s:
            raise jinja2.TemplateRuntimeError(f"it takes over {MOST_S:g} s or {MOST_TICKS} turns")

    def loop(self, items: Iterable[Any]) -> Iterator[Any]:
        """The same items, counted."""
        for item in items:
            self.tick()
            yield item

    def texts(self, pieces: Iterable[str]) -> Iterator[str]:
        """The same texts, measured."""
        for piece in pieces:
            self._characters += len(piece)
            check_size(self._characters)
            yield piece


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, where what takes time or memory is counted."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self.filters["tojson"] = _to_json
        self.filters["format"] = _format
        for name in REPEATING:
            self.filters[name] = _narrow(self.filters[name])
        self.filters["joined_"] = _joined
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _generate(self, source: nodes.Template, *arguments: Any, **more: Any) -> str:
        return super()._generate(Counted().visit(source), *arguments, **more)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(each) if hasattr(each, "__len__") else 0 for each in (left, right)]
        if operator == "*":
            numbers = [abs(each) for each in (left, right) if isinstance(each, int)]
            check_size(max(sizes) * max(numbers, default=1))
            check_size(sum(each.bit_length() for each in numbers))
        elif operator == "**":
            check_size(_bits(left) * abs(right) if isinstance(right, int) else 0)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        else:
            check_size(sum(sizes))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *arguments: Any, **more: Any) -> Any:
        context.resolve("limits_").tick()
        _check_widths(arguments, more)
        if getattr(function, "__name__", "") in ("format", "format_map"):
            _check_format(getattr(function, "__self__", ""))
        return super().call(context, function, *arguments, **more)


class Counted(NodeTransformer):
    """Puts the counts into a template's tree."""

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802, Jinja's name
        """Keep the limits from the template."""
        if node.name == "limits_":
            raise jinja2.TemplateSyntaxError("limits_ cannot be used", node.lineno)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802, Jinja's name
        """Count a loop's turns."""
        self.generic_visit(node)
        limits = nodes.Name("limits_", "load")
        # Through the sandbox's own call it would count twice.
        node.iter = nodes.Call(nodes.Getattr(limits, "loop", "load"), [node.iter], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802, Jinja's name
        """Measure what ``~`` joins."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "joined_", [], [], None, None)


def _marked(messages: Sequence[Message], mark: str) -> Message:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise InvalidRequest(
            "only a text of the assistant, as the last message, can be continued", "messages"
        )
    return {**last, "content": last["content"] + mark}


def check_size(size: int) -> None:
    """Raise TemplateRuntimeError where an expression makes too much."""
    if size > MOST_CHARACTERS:
        raise jinja2.TemplateRuntimeError(f"it makes over {MOST_CHARACTERS} characters")


def _bits(number: Any) -> int:
    return number.bit_length() if isinstance(number, int) else 64


def _joined(parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    check_size(sum(map(len, texts)))
    return "".join(texts)


def _format(text: Any, *arguments: Any, **more: Any) -> str:
    _check_format(str(text))
    return str(text) % (more or arguments)


def _check_format(text: str) -> None:
    if re.search(r"\d{6}|%[^%a-zA-Z]*\*", text):
        raise jinja2.TemplateRuntimeError(f"{text[:50]!r} makes texts that are too wide")


def _narrow(function: Any) -> Any:
    @functools.wraps(function)
    def narrow(*arguments: Any, **more: Any) -> Any:
        _check_widths(arguments, more)
        return function(*arguments, **more)

    return narrow


def _check_widths(arguments: Sequence[Any], more: Mapping[str, Any]) -> None:
    for value in (*arguments, *more.values()):
        if isinstance(value, int) and abs(value) > MOST_WIDTH:
            raise jinja2.TemplateRuntimeError(f"{value} is over {MOST_WIDTH}")


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: Any) -> None:
    raise Refused(str(message))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
