"""Settings of the server, checked once. The engine's are in ``overlap_spec.config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overlap_spec.errors import ConfigError

Whitespace = Literal["compact", "bounded"] | int


@dataclass(frozen=True)
class ServerSettings:
    """Everything that the server can be told beside its engine.

    Attributes:
        host, port: Where it listens; port 0 takes a free one.
        api_key: What clients must send as a bearer token; None asks for none.
        served_model_name: What ``/v1/models`` lists and ``model`` must be.
        tool_call_parser: How the model spells tool calls: a file of ``grammar/tool_formats``.
            None refuses tools.
        reasoning_parser: How the model marks its thinking; None: it does not think.
        whitespace: White space of JSON where the request does not say.
        best_effort: Leave out schema keywords that no backend holds to, where the request does
            not say ``strict: true``.
        max_queued_requests: Requests that wait at most; more are answered with 429.
        request_timeout_s: Time that one HTTP request may take.
        drain_timeout_s: Time that requests under way have to end after SIGTERM.
        max_body_bytes: Size of a request's body.
        max_schema_bytes: Size of one schema, pattern or grammar.
        max_choices: Outputs of one request: prompts × n.
        cors_origins: Origins whose pages may call the server; none by default.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    served_model_name: str = "overlap-spec"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    whitespace: Whitespace = "compact"
    best_effort: bool = False
    max_queued_requests: int = 1024
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    max_body_bytes: int = 8 * 2**20
    max_schema_bytes: int = 512 * 2**10
    max_choices: int = 128
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError that names the first setting that cannot be."""
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be between 0 and 65535: {self.port}")
        if self.api_key == "":
            raise ConfigError("api_key is empty: leave it out, or set one")
        least = {
            "max_queued_requests": 0,
            "max_body_bytes": 1024,
            "max_schema_bytes": 64,
            "max_choices": 1,
            "request_timeout_s": 0.1,
            "drain_timeout_s": 0,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}: {getattr(self, name)}")
        _load_parsers(self.tool_call_parser, self.reasoning_parser)


def _load_parsers(tools: str | None, reasoning: str | None) -> None:
    """Raises ConfigError where a parser does not exist."""
    from overlap_spec.errors import GrammarError
    from overlap_spec.grammar.reasoning import load_reasoning
    from overlap_spec.grammar.tool_formats import load_format

    try:
        if tools is not None:
            load_format(tools)
        if reasoning is not None:
            load_reasoning(reasoning)
    except GrammarError as error:
        raise ConfigError(str(error)) from None
