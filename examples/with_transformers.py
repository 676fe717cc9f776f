"""JSON from a checkpoint by `transformers`: `python examples/with_transformers.py [CHECKPOINT]`.

Without a checkpoint it asks the model that the package ships.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import overlap_spec
from overlap_spec.grammar import Grammar, GrammarCompiler, Vocabulary
from overlap_spec.grammar.adapters.transformers import GrammarLogitsProcessor

PERSON = json.loads((Path(__file__).parent / "person.schema.json").read_text())
EMBEDDED = str(Path(overlap_spec.__file__).parent / "embedded" / "target")
TEXTS = ["Ada Lovelace, 36, lives in London.", "My name is Grace Hopper and I am 85."]


def ask(checkpoint: str, texts: list[str], schema: dict[str, Any]) -> list[Any]:
    """What the model reads in each text, as values of the schema."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    vocabulary = Vocabulary.of(
        tokenizer, size=model.config.vocab_size, stop_ids=model.generation_config.eos_token_id
    )
    # Kept for all calls: a grammar that was compiled once is there at once.
    with GrammarCompiler.for_vocabulary(vocabulary) as compiler:
        held = GrammarLogitsProcessor(compiler.compile(Grammar.json_schema(schema)))
        chats = [[{"role": "user", "content": text}] for text in texts]
        prompts = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        found = model.generate(**prompts, max_new_tokens=200, logits_processor=[held])
    answers = found[:, prompts["input_ids"].shape[1] :]
    return [json.loads(text) for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


if __name__ == "__main__":
    for text, value in zip(TEXTS, ask((sys.argv[1:] or [EMBEDDED])[0], TEXTS, PERSON), strict=True):
        print(text, "→", json.dumps(value))
