"""Grammars in `transformers`' generation and in llama-cpp-python's."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler, Vocabulary
from overlap_spec.grammar.adapters import llama_cpp
from overlap_spec.grammar.adapters.transformers import GrammarLogitsProcessor
from tests.support.checkpoints import SHAPE, write_target
from tests.support.llama_cpp import Llama

STOP, PAD = 259, 256
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "maximum": 999}, "on": {"type": "boolean"}},
    "required": ["id", "on"],
}
CODE = "[a-f]{4}-[0-9]{2}"
# Prompts of several lengths, padded on the left.
PROMPTS = [b"one", b"twenty-two", b"three"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    path = tmp_path_factory.mktemp("model")
    write_target(path, seed=3)
    return LlamaForCausalLM.from_pretrained(path)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    texts = [bytes([byte]) for byte in range(256)]
    vocabulary = Vocabulary((*texts, b"", b"", b"", b""), SHAPE["vocab_size"], (STOP,))
    with GrammarCompiler.for_vocabulary(vocabulary, isolated=False) as compiler:
        yield compiler


def generate(model: LlamaForCausalLM, processor: Any, **settings: Any) -> list[str]:
    """The outputs for the prompts, up to the stop token."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[PAD] * (longest - len(text)) + list(text) for text in PROMPTS])
    torch.manual_seed(0)
    found = model.generate(
        ids,
        attention_mask=(ids != PAD).long(),
        logits_processor=[processor],
        max_new_tokens=60,
        pad_token_id=PAD,
        eos_token_id=STOP,
        **settings,
    )
    rows = found[:, longest:].tolist()
    assert all(STOP in row for row in rows)
    return [bytes(row[: row.index(STOP)]).decode() for row in rows]


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"do_sample": True, "num_return_sequences": 4},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 3},
    ],
    ids=["greedy", "sampled", "beams", "sampled beams"],
)
def test_each_prompt_has_its_grammar(
    model: LlamaForCausalLM, compiler: GrammarCompiler, settings: dict[str, Any]
) -> None:
    grammars = [Grammar.json_schema(SCHEMA), Grammar.regex(CODE), Grammar.choice(["yes", "no"])]
    compiled = [compiler.compile(grammar) for grammar in grammars]
    processor = GrammarLogitsProcessor(compiled, num_beams=settings.get("num_beams", 1))
    outputs = generate(model, processor, **settings)
    each = settings.get("num_return_sequences", 1)
    assert len(outputs) == 3 * each
    for text in outputs[:each]:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert all(re.fullmatch(CODE, text) for text in outputs[each : 2 * each])
    assert set(outputs[2 * each :]) <= {"yes", "no"}


def test_greedy_takes_the_best_allowed_token(
    model: LlamaForCausalLM, compiler: GrammarCompiler
) -> None:
    compiled = compiler.compile(Grammar.regex("[0-9]{5}"))
    outputs = generate(model, GrammarLogitsProcessor(compiled), do_sample=False)
    digits = list(range(48, 58))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = list(prompt)
        for digit in output.encode():
            scores = model(torch.tensor([ids])).logits[0, -1, digits]
            assert scores.max() - scores[digits.index(digit)] < 1e-4
            ids.append(digit)


def test_one_processor_serves_one_call(model: LlamaForCausalLM, compiler: GrammarCompiler) -> None:
    processor = GrammarLogitsProcessor(compiler.compile(Grammar.regex("[ab]")))
    generate(model, processor, do_sample=False)
    with pytest.raises(ValueError, match="one call"):
        processor(torch.tensor([[1, 2]]), torch.zeros(1, 260))


def test_what_cannot_be_held_is_told(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(Grammar.regex("[ab]{2}"))
    with pytest.raises(ValueError, match="2 grammars do not go with 3 rows"):
        GrammarLogitsProcessor([compiled] * 2)(torch.zeros(3, 1).long(), torch.zeros(3, 260))
    with pytest.raises(ValueError, match=r"size=model\.config\.vocab_size"):
        GrammarLogitsProcessor(compiled)(torch.zeros(1, 1).long(), torch.zeros(1, 100))
    processor = GrammarLogitsProcessor(compiled)
    masked = processor(torch.tensor([[7]]), torch.zeros(1, 264))
    assert masked[0].isfinite().nonzero().flatten().tolist() == [97, 98]
    with pytest.raises(ValueError, match="row 0 has tokens that its grammar forbids"):
        processor(torch.tensor([[7, 99]]), torch.zeros(1, 264))


def test_a_vocabulary_that_lacks_a_letter_is_told() -> None:
    vocabulary = Vocabulary((b"a", b"", b"b"), 3, (1,))
    with GrammarCompiler.for_vocabulary(vocabulary, "reference", isolated=False) as compiler:
        processor = llama_cpp.GrammarLogitsProcessor(compiler.compile(Grammar.regex("ac")))
    prompt = np.array([2], np.intc)
    assert processor(prompt, np.zeros(3, np.single)).tolist() == [0, -np.inf, -np.inf]
    with pytest.raises(GrammarError, match="the vocabulary lacks"):
        processor(np.array([2, 0], np.intc), np.zeros(3, np.single))


def test_llama_cpp_may_go_back_to_where_it_was() -> None:
    llama = Llama()
    with GrammarCompiler.for_vocabulary(Vocabulary.of(llama), isolated=False) as compiler:
        compiled = compiler.compile(Grammar.choice(["ab", "ac", "bd"]))
    processor, first = llama_cpp.GrammarLogitsProcessor(compiled), 3
    scores = np.zeros(llama.n_vocab(), np.single)

    def legal(text: bytes) -> list[int]:
        ids = np.array([0, 9, *(first + byte for byte in text)], np.intc)
        return [int(token) for token in np.flatnonzero(np.isfinite(processor(ids, scores)))]

    assert legal(b"") == [first + 97, first + 98]
    assert legal(b"a") == [first + 98, first + 99]
    assert legal(b"b") == [first + 100]
    assert legal(b"ac") == [llama.token_eos()]
    assert not scores.any()
    with pytest.raises(ValueError, match="forbids"):
        legal(b"x")
    with pytest.raises(ValueError, match="one call"):
        processor(np.array([1, 2], np.intc), scores)
    with pytest.raises(ValueError, match="the vocabulary has 259 tokens"):
        processor(np.array([0, 9], np.intc), scores[:7])
