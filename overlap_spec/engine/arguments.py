"""What callers in Python give: prompts, grammars, tools and numbers of outputs, one or many."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from overlap_spec.errors import GrammarError, InvalidRequest
from overlap_spec.grammar.schemas.functions import as_tool, is_function
from overlap_spec.grammar.spec import AdditionalProperties, Grammar
from overlap_spec.types import Output, Request, SamplingParams

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]
Sampling = SamplingParams | Mapping[str, Any] | None
# What `grammar` may be: see :func:`as_grammar`. Of types, those that mypy takes for one; for others
# (`Literal[…]`, unions) there is `Grammar.of`.
GrammarLike = Grammar | type[Any] | Callable[..., Any] | Mapping[str, Any] | re.Pattern[str] | None


def as_grammar(grammar: Any, additional_properties: str = "closed") -> Grammar | None:
    """What a caller gives as a grammar: a Grammar, a schema as a dict, or a type as
    :meth:`Grammar.of` takes it; None and ``str`` are free text. ``additional_properties``: as
    :class:`Grammar` has it, for what is no Grammar yet. GrammarError: it is text, which may mean
    several things, or nothing that has a grammar."""
    if grammar is None or grammar is str:
        return None
    if isinstance(grammar, str):
        raise GrammarError(
            "a text may be many a grammar: say Grammar.json_schema(text), Grammar.regex(text) or "
            f"Grammar.ebnf(text): {grammar[:60]!r}",
            "grammar",
        )
    kept = cast("AdditionalProperties", additional_properties)
    return Grammar.of(grammar, additional_properties=kept)


def as_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """Tool definitions as data: those of plain functions are made of what these say. InvalidRequest
    names one that is neither."""
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise InvalidRequest("tools must be a list of definitions or functions", "tools")
    made = [as_tool(tool) if is_function(tool) else tool for tool in tools]
    for number, tool in enumerate(made):
        if not isinstance(tool, Mapping):
            said = f"tools[{number}] is no definition, and no function: {tool!r}"
            raise InvalidRequest(said[:200], "tools")
    return made


def as_prompts(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts of a call, and whether it was a single one."""
    if isinstance(prompt, str):
        return [prompt], True
    if not isinstance(prompt, Sequence):
        raise InvalidRequest(f"prompt must be text, messages, or a list: {prompt!r}", "prompt")
    if is_token_ids(prompt) or _is_chat(prompt):
        return [cast("Prompt", prompt)], True
    for part in prompt:
        if not (isinstance(part, str) or is_token_ids(part) or _is_chat(part)):
            raise InvalidRequest(f"a prompt must be text or a list of messages: {part!r}", "prompt")
    return [cast("Prompt", part) for part in prompt], False


def _is_chat(prompt: Any) -> bool:
    listed = isinstance(prompt, Sequence) and bool(prompt)
    return listed and all(isinstance(message, Mapping) for message in prompt)


def each_call(
    prompt: Prompt | Sequence[Prompt], grammar: Any, sampling: Any, additional_properties: str
) -> tuple[list[tuple[Prompt, Grammar | None, Sampling]], bool]:
    """Each prompt of a call with its grammar and sampling, each one for all or a list, and whether
    it was a single one; ``grammar`` and ``additional_properties`` as :func:`as_grammar` takes
    them."""
    prompts, single = as_prompts(prompt)
    if not isinstance(grammar, list | tuple):
        # A type's is made once.
        grammar = as_grammar(grammar, additional_properties)
    given = _each("grammar", grammar, len(prompts))
    grammars = [as_grammar(one, additional_properties) for one in given]
    samplings = _each("sampling", sampling, len(prompts))
    return list(zip(prompts, grammars, samplings, strict=True)), single


def _each(name: str, value: Any, count: int) -> list[Any]:
    """The value of each of ``count`` prompts: ``value`` itself, or its items if it is a list."""
    if isinstance(value, list | tuple):
        if len(value) != count:
            raise InvalidRequest(f"{len(value)} values of {name} for {count} prompts", name)
        return list(value)
    return [value] * count


def is_token_ids(prompt: Any) -> bool:
    """Whether a prompt is a list of token ids."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    )


def copies(request: Request, count: Any) -> list[Request]:
    """``count`` times a request, with consecutive seeds; the first alone tells what they share: the
    prompt's log-probabilities, and a choice's probabilities. InvalidRequest: no number over 0."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidRequest(f"n must be an integer >= 1: {count!r}", "n")
    return [_copy(request, number) for number in range(count)]


def _copy(request: Request, number: int) -> Request:
    # Modulo 2**64, as a signed integer.
    copy = replace(request, seed=(request.seed + number + 2**63) % 2**64 - 2**63)
    if number and request.sampling.prompt_logprobs is not None:
        copy = replace(copy, sampling=replace(copy.sampling, prompt_logprobs=None))
    if number and request.grammar is not None and request.grammar.probabilities:
        copy = replace(copy, grammar=replace(request.grammar, probabilities=False))
    return copy


def grouped(
    outputs: list[Output], n: int | None, single: bool
) -> Output | list[Output] | list[list[Output]]:
    """The outputs of a call as it returns them: alone, or ``n`` of each prompt in a list."""
    if n is None:
        return outputs[0] if single else outputs
    lists = [outputs[first : first + n] for first in range(0, len(outputs), n)]
    return lists[0] if single else lists
