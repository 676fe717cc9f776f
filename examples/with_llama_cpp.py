"""JSON from a GGUF file by llama-cpp-python: `python examples/with_llama_cpp.py FILE.gguf`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from llama_cpp import Llama, LogitsProcessorList

from overlap_spec.grammar import Grammar, GrammarCompiler, Vocabulary
from overlap_spec.grammar.adapters.llama_cpp import GrammarLogitsProcessor

PERSON = json.loads((Path(__file__).parent / "person.schema.json").read_text())


def ask(llama: Llama, text: str, schema: dict[str, Any]) -> Any:
    """What the model reads in a text, as a value of the schema."""
    with GrammarCompiler.for_vocabulary(Vocabulary.of(llama)) as compiler:
        held = GrammarLogitsProcessor(compiler.compile(Grammar.json_schema(schema)))
    found = llama.create_chat_completion(
        [{"role": "user", "content": text}],
        max_tokens=200,
        logits_processor=LogitsProcessorList([held]),
    )
    return json.loads(found["choices"][0]["message"]["content"])


if __name__ == "__main__":
    print(ask(Llama(sys.argv[1], verbose=False), "Ada Lovelace, 36, lives in London.", PERSON))
