"""The examples of grammars in other libraries."""

import importlib
import sys

import jsonschema
import pytest

from tests.support import llama_cpp


def test_with_transformers() -> None:
    from examples import with_transformers as example

    found = example.ask(example.EMBEDDED, example.TEXTS, example.PERSON)
    assert [value["name"] for value in found] == ["Ada Lovelace", "Grace Hopper"]
    for value in found:
        jsonschema.validate(value, example.PERSON)


@pytest.mark.ci
def test_with_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", llama_cpp)
    example = importlib.import_module("examples.with_llama_cpp")
    for seed in range(3):
        jsonschema.validate(
            example.ask(llama_cpp.Llama(seed), "Hi", example.PERSON), example.PERSON
        )
