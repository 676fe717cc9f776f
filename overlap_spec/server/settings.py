"""Settings of the server. The engine's are in ``overlap_spec.config``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from overlap_spec.config import setting
from overlap_spec.errors import ConfigError

Whitespace = Literal["compact", "bounded"] | int


@dataclass(frozen=True)
class ServerSettings:
    """All settings of the server besides its engine's."""

    host: str = setting("Address to listen on.", "127.0.0.1")
    port: int = setting("Port to listen on; 0 takes a free one.", 30000)
    ssl_certfile: Path | None = setting(
        "Certificate chain (PEM); with it, the server speaks HTTPS."
    )
    ssl_keyfile: Path | None = setting("The certificate's private key (PEM), if its file has none.")
    api_key: str | None = setting("Bearer token that clients must send; by default none is needed.")
    api_key_file: Path | None = setting(
        "File of such tokens, one a line; unlike a flag, no other process sees them."
    )
    admin_api_key: str | None = setting(
        "Bearer token for what reaches all clients' requests; without one, nobody may."
    )
    admin_api_key_file: Path | None = setting("File of such tokens, one a line.")
    served_model_name: str = setting(
        "Name that /v1/models lists and that `model` must be.", "overlap-spec"
    )
    tool_call_parser: str | None = setting(
        "Format of the model's tool calls (hermes, mistral, …: the files of "
        "grammar/tools/formats); by default the one that the chat template shows, and where it "
        "shows none, requests with tools are refused."
    )
    reasoning_parser: str | None = setting(
        "Format of the model's thinking (deepseek_r1, qwen3, …); by default it has none."
    )
    whitespace: Whitespace = setting(
        "White space in JSON, unless a request says: compact, bounded, or an indent's width.",
        "compact",
    )
    best_effort: bool = setting(
        "Leave out schema keywords that no backend enforces, unless a request says strict; the "
        "finished output is validated.",
        False,
        ("--best-effort",),
    )
    max_queued_requests: int = setting(
        "Most requests that wait; more are refused with status 429.", 1024
    )
    stall_timeout_s: float = setting(
        "Restart an engine that owes an answer and sends nothing for so long, in seconds.", 120.0
    )
    request_timeout_s: float = setting("Time limit of one HTTP request, in seconds.", 600.0)
    drain_timeout_s: float = setting(
        "Time that open requests have to end after SIGTERM, in seconds.", 30.0
    )
    max_connections: int = setting(
        "Most open connections; one more closes one that waits for a request, or is refused with "
        "status 503. An address with less than its part of them finds room all the same.",
        1024,
    )
    header_timeout_s: float = setting(
        "Time that the head of a request has to come, in seconds.", 10.0
    )
    body_timeout_s: float = setting(
        "Time that the body of a request has to come, in seconds.", 30.0
    )
    idle_timeout_s: float = setting(
        "Time after which a connection without a request is closed, in seconds.", 30.0
    )
    max_body_bytes: int = setting("Largest body of a request, in bytes.", 8 * 2**20)
    max_bodies_bytes: int = setting(
        "Most bytes of all bodies in flight; more are refused with status 429.", 64 * 2**20
    )
    max_front_bytes: int = setting(
        "Resident memory of the HTTP process above which it refuses requests with status 503, "
        "unless it has no other.",
        2**30,
    )
    max_schema_bytes: int = setting("Largest schema, pattern or grammar, in bytes.", 512 * 2**10)
    max_choices: int = setting("Most outputs of one request: prompts × n.", 128)
    cors_origins: tuple[str, ...] = setting(
        "Origins whose pages may call the server; by default none.", ()
    )
    allowed_hosts: tuple[str, ...] = setting(
        "Names that clients may call the server by, besides localhost; without one, any on an "
        "address other than loopback.",
        (),
    )
    trusted_proxies: tuple[str, ...] = setting(
        "Address or network of a proxy whose X-Forwarded-For is believed; by default none.", ()
    )

    def __post_init__(self) -> None:
        """Raise ConfigError that names the first invalid setting."""
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be between 0 and 65535: {self.port}")
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ConfigError(f"trusted_proxies: no address or network: {error}") from None
        for name in ("api_key", "admin_api_key"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty: leave it out, or set one")
        least = {
            "max_queued_requests": 0,
            "max_body_bytes": 1024,
            "max_bodies_bytes": 1024,
            "max_front_bytes": 1,
            "max_schema_bytes": 64,
            "max_choices": 1,
            "max_connections": 1,
            "header_timeout_s": 0.1,
            "body_timeout_s": 0.1,
            "idle_timeout_s": 0.1,
            "request_timeout_s": 0.1,
            "drain_timeout_s": 0,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}: {getattr(self, name)}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile goes with ssl_certfile")
        _load_parsers(self.tool_call_parser, self.reasoning_parser)


def _load_parsers(tools: str | None, reasoning: str | None) -> None:
    """Raise ConfigError if a parser does not exist."""
    from overlap_spec.errors import GrammarError
    from overlap_spec.grammar.reasoning.reply import load_reasoning
    from overlap_spec.grammar.tools.formats import load_format

    try:
        if tools is not None:
            load_format(tools)
        if reasoning is not None:
            load_reasoning(reasoning)
    except GrammarError as error:
        raise ConfigError(str(error)) from None
