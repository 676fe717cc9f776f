"""Attacks that take the engine's memory; part of :mod:`bench.attack`."""

from __future__ import annotations

from typing import Any

import httpx

from bench.attack_shares import CHAT, HI, Attack, asked, attacking_client, numbers

GENERATE = "/generate"
# What takes memory may take its time.
PATIENCE_S = 600.0
LONG_REGEXES, ENUM_TEXTS, DOUBLINGS, PROMPTS = 34, 5000, 60, 64


async def _ask(where: str, *bodies: dict[str, Any]) -> int:
    """Ask with all bodies, one after another; the highest status."""
    async with attacking_client(1, PATIENCE_S) as client:
        return max([(await client.post(where, json=body)).status_code for body in bodies])


def _asks(path: str, body: dict[str, Any]) -> Attack:
    return lambda _, url: _ask(url + path, body)


async def lexer_states(_: httpx.AsyncClient, url: str) -> int:
    """Small regexes, each with its own states, under long random texts."""
    part = r"([a-z ]*[aeiou][a-z ]{20})([a-z ]*[bcd][a-z ]{21})[a-z ]*"
    more = {"messages": HI, "max_tokens": 400, "temperature": 1.5}
    bodies = [more | {"regex": f"w{next(numbers)}{part}"} for _ in range(LONG_REGEXES)]
    return await _ask(url + CHAT, *bodies)


async def large_enums(_: httpx.AsyncClient, url: str) -> int:
    """Schemas whose masks take long lists of states."""
    texts = [f"{number * 7919 % 10**6:06d} text" for number in range(ENUM_TEXTS)]
    bodies = [asked({"enum": [f"{next(numbers)}", *texts]}, max_tokens=16) for _ in range(4)]
    return await _ask(url + CHAT, *bodies)


async def new_prompts(_: httpx.AsyncClient, url: str) -> int:
    """Prompts that nobody asks with again."""
    first = next(numbers)
    texts = [f"{first} {number} " + "hello world " * 300 for number in range(PROMPTS)]
    body = {"text": texts, "sampling_params": {"max_new_tokens": 1}}
    return await _ask(url + GENERATE, body)


def memory_attacks() -> dict[str, Attack]:
    """These attacks by their names."""
    doubled = "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(DOUBLINGS))
    forced = {"structured_outputs": {"grammar": f'{doubled}a{DOUBLINGS} ::= "a"'}}
    short = {"messages": HI, "max_tokens": 64}
    long = {"max_new_tokens": 400, "ignore_eos": True, "n": 16}
    logprobs = {"text": "a", "return_logprob": True, "top_logprobs_num": 20}
    return {
        "doubled_rules": _asks(CHAT, short | forced),
        "repeated": _asks(CHAT, short | {"regex": "a{2147483647}"}),
        "long_names": _asks(
            GENERATE, {"text": "a", "rid": "r" * 8_000_000, "sampling_params": {"n": 128}}
        ),
        "lexer_states": lexer_states,
        "large_enums": large_enums,
        "new_prompts": new_prompts,
        "logprobs": _asks(
            GENERATE, logprobs | {"return_text_in_logprobs": True, "sampling_params": long}
        ),
    }
