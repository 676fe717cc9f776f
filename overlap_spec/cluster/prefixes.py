"""Which replica has computed how much of a prompt, as far as the router can know.

A prompt is known by the bytes of the request that it is made of, before any template or tokenizer:
two requests whose bytes agree up to some place have prompts that agree up to about there. The bytes
are cut into blocks, and each block's hash holds the one before, so that a hash stands for a whole
prefix. A replica's blocks are forgotten in the order of their last use, as its KV pages are.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from random import Random
from typing import NamedTuple

import msgspec

# Bytes of a block: about a page of the KV cache, at 4 bytes a token and 16 tokens a page.
BLOCK_BYTES = 64
# Blocks of a prompt that are looked at: 128 KiB.
MOST_BLOCKS = 2048
# Blocks of a replica that has not told yet how many its KV cache holds.
USUAL_BLOCKS = 2**15
# Of a cache, what is counted on for prompts: answers and requests that run take the rest, and to
# count on too much costs more hits than on too little.
PROMPTS_SHARE = 0.75
# What a token stands for in bytes is measured on it: prose, and data as a schema has them.
SAMPLE = (
    "You are a careful assistant. Read the message below, and answer in one short paragraph, or in "
    "the form that is asked for; say so where the text does not tell. Anna Keller of 14 Mill Road "
    "ordered 3 lamps on 2026-04-17 and paid 89.90 EUR. "
    '{"name": "Anna Keller", "items": [{"product": "lamp", "count": 3}], "paid": true}'
)
# Replicas whose memories differ by less are as good as each other for a new prompt.
EIGHTHS = 8
RAW = msgspec.Raw(b"")

Blocks = tuple[int, ...]


class Keyed(msgspec.Struct):
    """The fields of any route's body that its prompt is made of, in the order in which templates
    write them, as their JSON text."""

    cache_salt: msgspec.Raw = RAW
    tools: msgspec.Raw = RAW
    instructions: msgspec.Raw = RAW
    system: msgspec.Raw = RAW
    messages: msgspec.Raw = RAW
    input: msgspec.Raw = RAW
    prompt: msgspec.Raw = RAW
    text: msgspec.Raw = RAW
    input_ids: msgspec.Raw = RAW


DECODER = msgspec.json.Decoder(Keyed)


def prompt_bytes(body: bytes) -> bytes:
    """The bytes that a request's prompt is known by; none if the body is not a JSON object."""
    try:
        keyed = DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b""
    return b"\0".join(
        bytes(part) for name in Keyed.__struct_fields__ if (part := getattr(keyed, name))
    )


def blocks_of(text: bytes) -> Blocks:
    """The hashes of all prefixes of whole blocks, shortest first, at most :data:`MOST_BLOCKS`."""
    whole = min(len(text) // BLOCK_BYTES, MOST_BLOCKS) * BLOCK_BYTES
    found, before = [], b""
    for start in range(0, whole, BLOCK_BYTES):
        block = text[start : start + BLOCK_BYTES]
        before = hashlib.blake2b(before + block, digest_size=8).digest()
        found.append(int.from_bytes(before, "big"))
    return tuple(found)


def capacity_of(tokens: int, sample_tokens: int) -> int:
    """Blocks of prompts that a KV cache of so many tokens holds; ``sample_tokens``: of
    :data:`SAMPLE`."""
    return max(1, int(PROMPTS_SHARE * tokens * len(SAMPLE) / sample_tokens / BLOCK_BYTES))


def slack_of(running: int) -> int:
    """Requests that a replica, which runs so many at once, may have open beyond the least busy one
    and still be chosen for what it has computed: more cost waiting, and fewer cost prefixes."""
    return max(4, running // 4)


class Choice(NamedTuple):
    """A replica, and how many of the prompt's blocks it is known to have."""

    replica: str
    matched: int


class PrefixMap:
    """The blocks that each replica was sent, bounded for each: a map that keeps more than a cache
    does sends prompts where they are not any more.

    Args:
        capacity: Blocks that are kept of a replica that has not told how many it holds.
        slack: See :func:`slack_of`.
        seed: Of what is drawn among replicas that are alike, for a prompt without blocks.
    """

    def __init__(self, capacity: int, slack: int, seed: int | None = None) -> None:
        self.capacity, self.slack = capacity, slack
        self._random = Random(seed)
        self._held: dict[str, OrderedDict[int, None]] = {}
        self._capacities: dict[str, int] = {}

    def keep(self, replicas: Mapping[str, int | None]) -> None:
        """Forget all replicas but these; of each how many blocks it holds, None where it has not
        told."""
        self._held = {name: self._held.get(name) or OrderedDict() for name in replicas}
        self._capacities = {name: told for name, told in replicas.items() if told is not None}
        for name in replicas:
            self.insert(name, ())

    def insert(self, replica: str, blocks: Blocks) -> None:
        """Note that a replica computes, or has used again, a prompt."""
        held = self._held.setdefault(replica, OrderedDict())
        capacity = self._capacities.get(replica, self.capacity)
        # The longest first: it is forgotten before what it begins with.
        for block in reversed(blocks[:capacity]):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)

    def matched(self, replica: str, blocks: Blocks) -> int:
        """How many of a prompt's first blocks a replica has."""
        held = self._held.get(replica, ())
        return next((n for n, block in enumerate(blocks) if block not in held), len(blocks))

    def rank(self, blocks: Blocks, loads: Mapping[str, int]) -> list[Choice]:
        """Replicas, best first: those that are not far busier than the least busy one, by the
        longest prefix that they have, then by load, then by how full they are, in eighths, and then
        by a hash that all routers share, so that they send a new prompt to the same replica;
        ``loads``: open requests of each."""
        if not loads:
            return []
        most = min(loads.values()) + self.slack
        # Without a prompt to go by, routers that agreed would all send to the same replica.
        start = blocks[0] if blocks else self._random.getrandbits(64)
        # Plain tuples, and one look at most replicas: there may be a thousand.
        keys = list[tuple[bool, int, int, int, int]]()
        for index, (name, load) in enumerate(loads.items()):
            held = self._held.get(name, ())
            matched = self.matched(name, blocks) if start in held else 0
            filled = EIGHTHS * len(held) // self._capacities.get(name, self.capacity)
            keys.append((load > most, -matched, load, filled, index))
        keys.sort()
        names = list(loads)
        ranked = [Choice(names[index], -matched) for _, matched, _, _, index in keys]
        # Of the best alone: a hash of each of a thousand would take longer than all the rest.
        alike = next((i for i, key in enumerate(keys) if key[:4] != keys[0][:4]), len(keys))
        ranked[:alike] = sorted(ranked[:alike], key=lambda choice: _weight(choice.replica, start))
        return ranked


def _weight(replica: str, block: int) -> int:
    """Rendezvous hashing: any two routers order the replicas of a prompt alike."""
    digest = hashlib.blake2b(f"{replica} {block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
