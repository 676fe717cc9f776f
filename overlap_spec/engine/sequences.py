"""From a request to the sequence that the scheduler runs."""

from __future__ import annotations

import itertools
from dataclasses import replace

from overlap_spec.engine.input_processor import Limits
from overlap_spec.errors import InvalidRequest
from overlap_spec.grammar.automata.search import TextSearch, search
from overlap_spec.grammar.contract import CompiledGrammar, Matcher
from overlap_spec.grammar.drafting.few_texts import OutputTries
from overlap_spec.grammar.reasoning.matcher import ReasoningMatcher
from overlap_spec.grammar.room.matcher import RoomMatcher, least_tokens
from overlap_spec.scheduler.sequence import UNTOLD, Sequence
from overlap_spec.scheduler.stops import TextBuffer
from overlap_spec.steps import Guide
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Request
from overlap_spec.worker.extras.base import Surroundings, extras_of


class SequenceMaker:
    """Gives requests their numbers, and all that they need while they run.

    Args:
        tries: Whether drafts may be the few texts that an output can be.
        complete: Whether outputs under a grammar come to their end, where a request does not say.
        has_states: Whether the target has layers that keep a state.
    """

    def __init__(
        self, tokenizer: Tokenizer, limits: Limits, tries: bool, complete: bool, has_states: bool
    ) -> None:
        self._tokenizer, self._tries, self._complete = tokenizer, tries, complete
        known = tokenizer.vocabulary, tokenizer.encode
        longest = min(limits.context_tokens, limits.cache_tokens)
        self._surroundings = Surroundings(*known, longest, has_states)
        self._output_tries, self._ids = OutputTries(*known), itertools.count()

    def make(
        self, request: Request, compiled: CompiledGrammar | None, compile_ms: float
    ) -> Sequence:
        """A sequence of a request that gets the next number; ``compiled``: its grammar.
        InvalidRequest: a whole output is asked for, and none fits."""
        request = replace(request, id=next(self._ids))
        asked, grammar = request.sampling, request.grammar
        finders = [TextSearch(search(pattern, "stop_regex")) for pattern in asked.stop_regex]
        detokenizer, keeps = self._tokenizer.detokenizer(), asked.include_stop_str_in_output
        sequence = Sequence(request, TextBuffer(detokenizer, tuple(asked.stop), finders, keeps))
        sequence.matcher = self._matcher(sequence, compiled)
        sequence.extras = extras_of(request, self._surroundings)
        if compiled is not None:
            trie = self._output_tries.of(grammar) if self._tries else None
            sequence.maps = compiled.states, trie
            if compiled.states is not None:
                told = self._tokenizer.vocabulary.text, self._output_tries.cut, request.page_salt
                sequence.guide = Guide(compiled.states, *told)
        sequence.stats.prompt_tokens = len(request.prompt_ids)
        sequence.stats.grammar_compile_ms = compile_ms
        return sequence

    def room_tokens(self, request: Request) -> int | None:
        """How many tokens an output is to end within before it may be cut; 0: it may not start
        before it is told that it does. None: it may be cut."""
        complete = request.sampling.complete
        # Whole texts are chosen among, where the choice is faithful.
        if request.grammar is None or request.grammar.faithful or complete is False:
            return None
        if complete:
            return 0
        return request.max_tokens if self._complete else None

    def _matcher(self, sequence: Sequence, compiled: CompiledGrammar | None) -> Matcher | None:
        """A matcher of a request's grammar, whose outputs are whole if they are to be."""
        request = sequence.request
        asked, most = request.sampling, request.max_tokens
        matcher = None if compiled is None else compiled.matcher()
        if asked.thinking_budget is not None:
            if not isinstance(matcher, ReasoningMatcher):
                raise InvalidRequest(
                    "thinking_budget is for an answer after thinking, and there is none: send "
                    "Grammar.after_thinking(), or start the server with --reasoning-parser and "
                    "send a chat, or leave it out",
                    "thinking_budget",
                )
            matcher.limit(asked.thinking_budget)
        if compiled is None or matcher is None:
            return None
        if self.room_tokens(request) is None:
            return matcher
        room, least = compiled.room, None
        if room is not None:
            # Early on they are told before they are needed.
            early = not asked.complete and room.is_early(most)
            told = early or room.chart() is not None
            if told and (asked.complete or room.spells):
                least = least_tokens(compiled, most)
        if room is None or least is None:
            if asked.complete:
                raise InvalidRequest(
                    "nothing tells how long the grammar's texts are: make it smaller, or send "
                    "complete: false, or nothing",
                    "complete",
                )
            sequence.warnings += (UNTOLD,)
            return matcher
        if least <= most:
            return RoomMatcher(matcher, room, most)
        if asked.max_tokens is None:
            raise InvalidRequest(
                f"the prompt of {len(request.prompt_ids)} tokens leaves {most} of the context, and "
                f"the shortest output under the grammar takes {least}: shorten the prompt, or send "
                "complete: false",
                "prompt",
            )
        raise InvalidRequest(
            f"max_tokens {most} is too few: the shortest output under the grammar takes {least} "
            f"tokens; raise it to {least} at least, or send complete: false",
            "max_tokens",
        )
