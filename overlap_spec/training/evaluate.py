"""Figures of an embedded model: extraction with forced keys, free validity, accept length.

``python -m overlap_spec.training.evaluate --model DIR [--gsm8k FILE] [--cases N] [--json FILE]``
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer
from torch import Tensor

from overlap_spec.grammar.backends.xgrammar import XGrammarBackend
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.models.config import read_json
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.eagle3 import ARCHITECTURES
from overlap_spec.models.weights import load_decoder, load_eagle3
from overlap_spec.training.acceptance import Guesses, acceptance, head_guesses, model_guesses
from overlap_spec.training.cases import Case
from overlap_spec.training.data import (
    ASSISTANT,
    BOS,
    END,
    SYSTEM,
    USER,
    held_out_cases,
    read_gsm8k,
    tools_text,
)
from overlap_spec.training.generate import greedy
from overlap_spec.training.tokenizer import special_id

MAX_NEW = 200
CHAIN = 5
BATCH = 32
SHAPES = {
    "e-mail address": r"[^@ ]+@[^@ ]+",
    "date": r"\d{4}-\d\d-\d\d",
    "time": r"\d\d:\d\d",
}


def prompt_text(case: Case) -> str:
    """The prompt of a case through the chat template."""
    system = f"{SYSTEM}{tools_text(case)}{END}" if case.tools else ""
    return f"{BOS}{system}{USER}{case.prompt}{END}{ASSISTANT}"


class GrammarMask:
    """Masks the logits of a batch by one grammar a row and feeds it what greedy decoding takes.

    Args:
        backend: Grammar backend of the model's vocabulary.
        schemas: The JSON schema of each row.
    """

    def __init__(self, backend: XGrammarBackend, schemas: list[dict[str, Any]]) -> None:
        self.matchers = [backend.compile(Grammar.json_schema(s)).matcher() for s in schemas]
        vocabulary = backend.vocabulary
        self.size = vocabulary.size
        self.row = np.zeros(vocabulary.words, np.int32)

    def __call__(self, running: list[int], logits: Tensor) -> None:
        for index in running:
            self.matchers[index].fill(self.row)
            bits = np.unpackbits(self.row.view(np.uint8), bitorder="little")[: self.size]
            logits[index][torch.from_numpy(bits == 0)] = -torch.inf
            self.matchers[index].accept(int(logits[index].argmax()))


def generate_cases(
    model: Decoder, tokenizer: Tokenizer, cases: list[Case], backend: XGrammarBackend | None
) -> list[tuple[list[int], list[int]]]:
    """Prompt and greedy output ids of each case, under its schema where there is a backend."""
    end = special_id(tokenizer, END)
    results: list[tuple[list[int], list[int]]] = []
    for start in range(0, len(cases), BATCH):
        part = cases[start : start + BATCH]
        prompts = [tokenizer.encode(prompt_text(c), add_special_tokens=False).ids for c in part]
        mask = GrammarMask(backend, [c.schema for c in part]) if backend else None
        outputs = greedy(model, prompts, [end], MAX_NEW, mask)
        results += list(zip(prompts, outputs, strict=True))
    return results


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The fields of an answer by path; an array is one field."""
    if not isinstance(value, dict):
        return {path: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found.update(leaves(inner, f"{path}/{key}"))
    return found


def shape_of(value: Any) -> str:
    """What a value looks like, for figures by shape."""
    if value is None or value in ("", []):
        return "not stated"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, (list, dict)):
        return "array" if isinstance(value, list) else "object"
    for shape, pattern in SHAPES.items():
        if re.fullmatch(pattern, value):
            return shape
    return "lower-case words" if value == value.lower() else "name or code"


def parse(tokenizer: Tokenizer, output: list[int]) -> Any:
    """The JSON value of an output, or None."""
    try:
        return json.loads(tokenizer.decode(output))
    except ValueError:
        return None


def score_forced(
    tokenizer: Tokenizer, cases: list[Case], outputs: list[list[int]]
) -> dict[str, Any]:
    """Share of answers that are right as a whole, and of their fields."""
    exact = right = total = 0
    for case, output in zip(cases, outputs, strict=True):
        answer = parse(tokenizer, output)
        exact += answer == case.answer
        got = leaves(answer) if isinstance(answer, dict) else {}
        wanted = leaves(case.answer)
        right += sum(path in got and got[path] == value for path, value in wanted.items())
        total += len(wanted)
    return {"exact": exact / len(cases), "fields": right / total, "cases": len(cases)}


def finished(
    runs: list[tuple[list[int], list[int]]], end: int
) -> list[tuple[list[int], list[int]]]:
    """The runs that ended by themselves: a loop cut at the limit would flatter any draft."""
    return [run for run in runs if run[1][-1] == end]


def gsm8k_runs(
    model: Decoder, tokenizer: Tokenizer, questions: list[str]
) -> list[tuple[list[int], list[int]]]:
    """Greedy chat answers to GSM8K questions."""
    cases = [Case(question, {}, {}, "gsm8k") for question in questions]
    return generate_cases(model, tokenizer, cases, None)


def evaluate(
    model: Decoder,
    tokenizer: Tokenizer,
    path: Path,
    count: int,
    guesses: Guesses | None,
    questions: list[str],
) -> dict[str, Any]:
    """All figures, by name."""
    end = special_id(tokenizer, END)
    vocabulary = Vocabulary.from_tokenizer_json(
        path / "tokenizer.json", model.config.vocab_size, [end]
    )
    backend = XGrammarBackend(vocabulary)
    figures: dict[str, Any] = {}
    kinds: tuple[Literal["seen", "unseen", "seen_tools", "unseen_tools"], ...] = (
        "seen",
        "unseen",
        "seen_tools",
        "unseen_tools",
    )
    for kind in kinds:
        cases = held_out_cases(1000, count, kind)
        runs = generate_cases(model, tokenizer, cases, backend)
        figures[kind] = score_forced(tokenizer, cases, [output for _, output in runs])
        if guesses is not None:
            figures[kind]["accept_length"] = acceptance(finished(runs, end), guesses, "cpu").length
    cases = held_out_cases(2000, count, "seen")
    runs = generate_cases(model, tokenizer, cases, None)
    answers = [parse(tokenizer, output) for _, output in runs]
    valid = [isinstance(answer, dict) for answer in answers]
    fitting = [
        Draft202012Validator(c.schema).is_valid(a) for c, a in zip(cases, answers, strict=True)
    ]
    figures["free"] = {"json": sum(valid) / count, "fits_schema": sum(fitting) / count}
    if guesses is not None:
        figures["free"]["accept_length"] = acceptance(finished(runs, end), guesses, "cpu").length
        if questions:
            runs = gsm8k_runs(model, tokenizer, questions)
            ended = finished(runs, end)
            figures["gsm8k"] = {
                "ended": len(ended) / len(runs),
                "accept_length": acceptance(ended, guesses, "cpu").length,
            }
    return figures


def load_guesses(path: Path, target: Decoder) -> Guesses:
    """What the draft head or draft model in folder ``path`` drafts, in chains of CHAIN."""
    if read_json(path / "config.json")["architectures"][0] in ARCHITECTURES:
        return head_guesses(target, load_eagle3(path, target, torch.float32), CHAIN)
    return model_guesses(load_decoder(path, torch.float32, torch.device("cpu")), CHAIN)


def main(arguments: list[str] | None = None) -> None:
    """Evaluate a folder and print its figures as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m overlap_spec.training.evaluate")
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--draft", type=Path, help="folder of a draft head or draft model")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K test split, .jsonl")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(arguments)
    cpu = torch.device("cpu")
    model = load_decoder(options.model, torch.float32, cpu)
    guesses = load_guesses(options.draft, model) if options.draft else None
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    pairs = read_gsm8k(options.gsm8k)[: options.cases] if options.gsm8k else []
    questions = [question for question, _ in pairs]
    figures = evaluate(model, tokenizer, options.model, options.cases, guesses, questions)
    line = json.dumps(figures)
    print(line)
    if options.json:
        options.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
