"""Which replica has computed how much of a prompt, as far as the router can know.

A prompt is known by the bytes of the request that it is made of, before any template or tokenizer:
two requests whose bytes agree up to some place have prompts that agree up to about there. The bytes
are cut into blocks, and each block's hash holds the one before, so that a hash stands for a whole
prefix. A replica's blocks are forgotten in the order of their last use, as its KV pages are.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import msgspec

# Bytes of a block: about a page of the KV cache, at 4 bytes a token and 16 tokens a page.
BLOCK_BYTES = 64
BYTES_PER_TOKEN = 4
# Blocks of a prompt that are looked at: 128 KiB.
MOST_BLOCKS = 2048
# Tokens of a replica's KV cache, where it is not told how many they are.
USUAL_TOKENS = 2**19
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


def capacity_of(tokens: int | None) -> int:
    """Blocks that a KV cache of so many tokens holds; None means that the size is not known."""
    return max(1, (tokens or USUAL_TOKENS) * BYTES_PER_TOKEN // BLOCK_BYTES)


def slack_of(running: int) -> int:
    """Requests that a replica may have open beyond the least busy one's and still be chosen for
    what it has computed: more cost waiting, and fewer cost prefixes (``bench.cluster_model``).

    Args:
        running: That a replica runs at once.
    """
    return max(4, running // 4)


@dataclass(frozen=True)
class Choice:
    """A replica, and how many of the prompt's blocks it is known to have."""

    replica: str
    matched: int


class PrefixMap:
    """The blocks that each replica was sent, bounded for each.

    Args:
        capacity: Blocks that are kept of a replica.
        slack: Requests that a replica may have open beyond the least busy one's and still be
            chosen for what it has computed.
        seed: Of what is drawn among replicas that are alike, for a prompt without blocks; None
            draws one.
    """

    def __init__(self, capacity: int, slack: int, seed: int | None = None) -> None:
        self.capacity, self.slack = capacity, slack
        self._random = Random(seed)
        self._held: dict[str, OrderedDict[int, None]] = {}

    def keep(self, replicas: Sequence[str]) -> None:
        """Forget all replicas but these."""
        self._held = {name: self._held.get(name) or OrderedDict() for name in replicas}

    def insert(self, replica: str, blocks: Blocks) -> None:
        """Note that a replica computes, or has used again, a prompt."""
        held = self._held.setdefault(replica, OrderedDict())
        # The longest first: it is forgotten before what it begins with.
        for block in reversed(blocks[: self.capacity]):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.capacity:
            held.popitem(last=False)

    def matched(self, replica: str, blocks: Blocks) -> int:
        """How many of a prompt's first blocks a replica has."""
        held = self._held.get(replica)
        if not held:
            return 0
        for count, block in enumerate(blocks):
            if block not in held:
                return count
        return len(blocks)

    def rank(self, blocks: Blocks, loads: Mapping[str, int]) -> list[Choice]:
        """Replicas, best first: those that are not far busier than the least busy one, by the
        longest prefix that they have, then by load, then by how full they are, in eighths, and then
        by a hash that all routers share, so that they send a new prompt to the same replica.

        Args:
            blocks: Of the prompt.
            loads: Open requests of each replica.
        """
        if not loads:
            return []
        most = min(loads.values()) + self.slack

        def key(choice: Choice) -> tuple[bool, int, int, int]:
            load = loads[choice.replica]
            filled = EIGHTHS * len(self._held.get(choice.replica, ())) // self.capacity
            return load > most, -choice.matched, load, filled

        ranked = sorted((Choice(name, self.matched(name, blocks)) for name in loads), key=key)
        # Of the best alone: a hash of each of a thousand would take longer than all the rest.
        best = key(ranked[0])
        # Without a prompt to go by, routers that agreed would all send to the same replica.
        start = blocks[0] if blocks else self._random.getrandbits(64)
        alike = [choice for choice in ranked if key(choice) == best]
        alike.sort(key=lambda choice: _weight(choice.replica, start))
        return alike + ranked[len(alike) :]


def _weight(replica: str, block: int) -> int:
    """Rendezvous hashing: any two routers order the replicas of a prompt alike."""
    digest = hashlib.blake2b(f"{replica} {block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
