"""A callable that generates values of one type."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.engine.arguments import Prompt, Sampling, as_grammar
from overlap_spec.engine.input_processor import GenerateOptions
from overlap_spec.errors import RequestFailed
from overlap_spec.types import Output

if TYPE_CHECKING:
    from overlap_spec.engine import Engine


class Generator:
    """Generates values of one type with an engine.

    ``Generator(engine, Person)("Maria is 34.")`` is a ``Person``; with an :class:`AsyncEngine`
    the call is awaited. The grammar is made once; an :class:`Engine` compiles it in advance.

    Args:
        engine: Runs the requests; the caller closes it.
        output_type: As for :meth:`Grammar.of`: a pydantic model, dataclass, TypedDict,
            ``Literal``, Enum, ``int``, ``list[…]``, a compiled pattern, a schema, or a Grammar;
            ``str`` is free text.
        sampling: Default of every call.

    Raises:
        GrammarError: there is no grammar for the type, or it cannot be compiled.
        EngineUnavailable: the engine is closed.
    """

    def __init__(
        self, engine: Engine | AsyncEngine, output_type: Any, sampling: Sampling = None
    ) -> None:
        self.engine, self.sampling = engine, sampling
        self.grammar = as_grammar(output_type, engine.config.additional_properties)
        if not isinstance(engine, AsyncEngine) and self.grammar is not None:
            engine.compile(self.grammar)

    def __call__(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        n: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """The value for a prompt, or a list of values for a list of prompts; with ``n`` a list of
        ``n`` values in each one's place.

        Args:
            prompt: As :meth:`Engine.generate` takes it.
            sampling: Replaces the generator's default.
            n: Values for each prompt, at consecutive seeds.
            options: As :meth:`Engine.generate` takes them: fields of SamplingParams, which go
                before those of ``sampling``, and ``raw``, ``tools`` and ``priority``.

        Raises:
            InvalidRequest, EngineUnavailable: as :meth:`Engine.generate`.
            RequestFailed: an output is not a complete value: it failed, was cut by ``max_tokens``
                or a stop string, or is a best-effort output that is not valid.
        """
        chosen = self.sampling if sampling is None else sampling
        # One type of a call's arguments is as good as another here.
        engine = cast("Any", self.engine)
        outputs = engine.generate(prompt, self.grammar, chosen, n, **options)
        return self._later(outputs) if isinstance(engine, AsyncEngine) else self._values(outputs)

    async def _later(self, outputs: Awaitable[Any]) -> Any:
        return self._values(await outputs)

    def _values(self, outputs: Any) -> Any:
        """The value of an output, or those of a list of them."""
        if isinstance(outputs, list):
            return [self._values(each) for each in outputs]
        return self._value(outputs)

    def _value(self, output: Output) -> Any:
        if output.error is not None:
            raise RequestFailed(output.error)
        if self.grammar is None:
            return output.text
        if output.finish_reason != "stop" or (output.parsed is None and output.text != "null"):
            raise RequestFailed(
                f"the output is no whole value (finish_reason {output.finish_reason!r}): "
                f"{output.text[-80:]!r}; raise max_tokens"
            )
        if output.verdict is not None and not output.verdict.valid:
            raise RequestFailed(f"the output is not valid: {output.verdict.reason}")
        return output.parsed
