"""Training documents of every kind, and evaluation cases. No torch here.

A document is a list of segments (text, weight): special tokens are written by name, and the
weight is that of the segment's tokens in the loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import ClassVar, Literal, get_args

from examples.embedded_model.cases import Case, CaseMaker, compact
from examples.embedded_model.fillers import invented_word, read_lines
from examples.embedded_model.interviews import Interviews
from examples.embedded_model.mixed import WideCases, with_schema, written
from examples.embedded_model.questions import Choice, Questions
from examples.embedded_model.scenes import SceneCases, SceneFillers
from examples.embedded_model.sums import Sums
from examples.embedded_model.templates import fresh_library
from examples.embedded_model.turns import WideTools, result_turn

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, TOOL = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
SPECIAL_TOKENS = (BOS, END, SYSTEM, USER, ASSISTANT, TOOL, PAD)
PROMPT_WEIGHT = 0.1
SYSTEM_PROMPTS = (
    "You extract JSON.",
    "You are a helpful assistant.",
    "Answer with JSON.",
    "You are a careful assistant that answers in JSON.",
)

Document = list[tuple[str, float]]


def chat(prompt: str, answer: str, system: str = "") -> Document:
    """One exchange as the chat template writes it; only the answer and its end weigh 1."""
    head = f"{BOS}{SYSTEM}{system}{END}" if system else BOS
    return [(f"{head}{USER}{prompt}{END}{ASSISTANT}", PROMPT_WEIGHT), (f"{answer}{END}", 1.0)]


def prompt_text(case: Case) -> str:
    """The prompt of a case through the chat template."""
    return chat(case.prompt, "", tools_text(case) if case.tools else "")[0][0]


def tools_text(case: Case) -> str:
    """The tools of a case as the chat template writes them in the system turn."""
    lines = []
    for tool in case.tools:
        function = tool["function"]
        arguments = ", ".join(function["parameters"]["properties"])
        lines.append(f"{function['name']}({arguments}): {function['description']}")
    return "\n".join(["Tools:", *lines])


# Of the answers to yes/no and choice questions: those in a word alone.
BARE_SHARE = 0.65


class DocumentMaker:
    """Draws training documents.

    Args:
        rng: Source of all choices.
        gsm8k: (question, answer) pairs of GSM8K's train split; empty to leave it out.
    """

    # Share of each kind of document, in the copying warm-up and after it.
    WARM_UP: ClassVar = {"random_copy": 0.45, "lookup": 0.4, "extraction": 0.15}
    MAIN: ClassVar = {
        "extraction": 0.57,
        "tool_call": 0.12,
        "choice": 0.05,
        "interview": 0.1,
        "short_answer": 0.025,
        "gsm8k": 0.03,
        "few_shot": 0.0015,
        "word_problem": 0.02,
        "lookup": 0.02,
        "random_copy": 0.01,
        "repeat": 0.01,
        "tool_result": 0.02,
        "small_talk": 0.008,
        "plain_fact": 0.015,
        "feast": 0.003,
        "many": 0.012,
    }

    def __init__(self, rng: Random, gsm8k: list[tuple[str, str]]) -> None:
        self.rng = rng
        self.gsm8k_pairs = gsm8k
        self.cases = SceneCases(rng)
        self.tools = WideTools(rng)
        self.questions = Questions(rng, cases=self.cases)
        self.interviews = Interviews(self.cases)
        self.sums = Sums(rng)
        self.fillers = SceneFillers(rng)
        self.pairs = [tuple(line.split(" => ")) for line in read_lines("chat.txt")]

    def make(self, warm_up: bool) -> Document:
        """The next document."""
        shares = self.WARM_UP if warm_up else self.MAIN
        kind = self.rng.choices(list(shares), list(shares.values()))[0]
        if kind in ("gsm8k", "few_shot") and not self.gsm8k_pairs:
            kind = "extraction"
        maker: Callable[[], Document] = getattr(self, kind)
        return maker()

    def extraction(self) -> Document:
        """Text to JSON."""
        case = self.cases.extraction()
        answer, cue = written(self.rng, case.answer)
        system, prompt = "", case.prompt + cue
        chance = self.rng.random()
        if chance < 0.12 and len(compact(case.schema)) < 700:
            system, prompt = with_schema(self.rng, prompt, case.schema)
        elif chance < 0.2:
            system = self.rng.choice(SYSTEM_PROMPTS)
        return chat(prompt, answer, system)

    def choice(self) -> Document:
        """A yes/no or choice question about a text, in a word or in JSON."""
        made = self.questions.about_text()
        return chat(made.prompt, self._wrapped(made))

    def interview(self) -> Document:
        """Several questions about one text, one after the other."""
        document: Document = []
        bare = self.rng.random() < BARE_SHARE
        for number, made in enumerate(self.interviews.several()):
            (prompt, weight), answer = chat(
                made.prompt, made.answer if bare else self._in_json(made)
            )
            document += [(prompt.removeprefix(BOS) if number else prompt, weight), answer]
        return document

    def plain_fact(self) -> Document:
        """A yes/no question about the world."""
        made = self.questions.about_the_world()
        return chat(made.prompt, self._wrapped(made))

    def _wrapped(self, made: Choice) -> str:
        return made.answer if self.rng.random() < BARE_SHARE else self._in_json(made)

    def _in_json(self, made: Choice) -> str:
        value: str | bool = made.answer
        if value in ("yes", "no") and self.rng.random() < 0.3:
            value = value == "yes"
        return compact({self.rng.choice(("answer", "answer", "result", "choice", "label")): value})

    def short_answer(self) -> Document:
        """One field asked for in words, answered with its bare value."""
        if self.rng.random() < 0.3:
            _, asked, answer = self.cases.question()
            return chat(asked, answer)
        return chat(*self.questions.short())

    def feast(self) -> Document:
        """The date of a yearly day."""
        return chat(*self.questions.feast())

    def word_problem(self) -> Document:
        """A short sum in words, worked out, or only its expression."""
        question, worked, expression = self.sums.problem()
        return chat(question, expression if self.rng.random() < 0.2 else worked)

    def many(self) -> Document:
        """Several exchanges in one chat: context that must not leak into the last answer."""
        document: Document = []
        for _ in range(self.rng.randint(2, 4)):
            case = self.cases.extraction()
            turn = chat(case.prompt, case.text)
            if document:
                turn[0] = (turn[0][0].removeprefix(BOS), turn[0][1])
            document += turn
        return document

    def tool_call(self) -> Document:
        """A tool call as JSON."""
        case = self.tools.tool_call()
        return chat(case.prompt, case.text, tools_text(case))

    def tool_result(self) -> Document:
        """A tool call, the tool's result, and the answer in words."""
        case = self.tools.tool_call()
        first, call = chat(case.prompt, case.text, tools_text(case))
        result, answer = result_turn(self.rng, self.fillers, case.template_id.partition(":")[0])
        turn = (f"{TOOL}{result}{END}{ASSISTANT}", PROMPT_WEIGHT)
        return [first, call, turn, (f"{answer}{END}", 1.0)]

    def small_talk(self) -> Document:
        """A greeting or a question about the model."""
        prompt, answer = self.rng.choice(self.pairs)
        return chat(prompt, answer)

    def gsm8k(self) -> Document:
        """A GSM8K question in a chat."""
        question, answer = self.rng.choice(self.gsm8k_pairs)
        return chat(question, answer)

    def few_shot(self) -> Document:
        """GSM8K questions with answers in plain text, up to eight before the last one."""
        shots = self.rng.choice((2, 4, 5, 8, 8))
        pairs = [self.rng.choice(self.gsm8k_pairs) for _ in range(shots + 1)]
        in_chat = self.rng.random() < 0.3
        document: Document = [(f"{BOS}{USER}" if in_chat else BOS, PROMPT_WEIGHT)]
        for number, (question, answer) in enumerate(pairs):
            weight = PROMPT_WEIGHT if in_chat and number < shots else 1.0
            document.append((f"Question: {question}\nAnswer:", PROMPT_WEIGHT))
            if in_chat and number == shots:
                document.append((f"{END}{ASSISTANT}", PROMPT_WEIGHT))
                document.append((f"{answer}{END}", 1.0))
            else:
                document.append((f" {answer}\n\n", weight))
        return document

    def lookup(self) -> Document:
        """Key-value pairs, and some of the keys asked for."""
        count = self.rng.choice((3, 5, 8, 12, 12, 20, 30))
        if self.rng.random() < 0.005:
            count = self.rng.randint(60, 250)
        keys = list({self._word(): None for _ in range(count)})
        kinds = ("code", "city", "person", "int:0-9999", "money", "email", "date", "thing")
        values = {key: self.fillers.draw(self.rng.choice(kinds))[0] for key in keys}
        layout = self.rng.choice(("{}: {}\n", "{} = {}\n", "{} {}, ", "{}: {}; "))
        text = "".join(layout.format(key, value) for key, value in values.items()).rstrip("\n,; ")
        asked = self.rng.sample(keys, min(len(keys), self.rng.choice((1, 2, 3, 5))))
        if self.rng.random() < 0.3:
            value = values[asked[0]]
            return chat(f"{text}\n{asked[0]}?", str(value))
        request = f"\nExtract {', '.join(asked)}." if self.rng.random() < 0.3 else ""
        return chat(text + request, compact({key: values[key] for key in asked}))

    def repeat(self) -> Document:
        """A text to be said again."""
        text = self.cases.extraction().prompt
        return chat(f"Repeat: {text}", text)

    def random_copy(self) -> Document:
        """Random words and codes, then the same again: the root of all copying."""
        words = [
            self._word() if self.rng.random() < 0.7 else self.fillers.draw("code")[0]
            for _ in range(self.rng.randint(4, 24))
        ]
        text = self.rng.choice((" ", ", ", "; ")).join(words)
        return [(f"{BOS}{text}\n", 0.0), (f"{text}{END}", 1.0)]

    def _word(self) -> str:
        word = invented_word(self.rng)
        style = self.rng.random()
        if style < 0.6:
            return word.lower()
        if style < 0.8:
            return f"{word.lower()}_{invented_word(self.rng).lower()}"
        return word


def read_gsm8k(path: Path) -> list[tuple[str, str]]:
    """(question, answer) pairs of a GSM8K ``.jsonl`` file."""
    rows = (json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip())
    return [(row["question"], row["answer"]) for row in rows]


CaseKind = Literal["seen", "unseen", "fresh", "seen_tools", "unseen_tools", "wide"]


def held_out_cases(seed: int, n: int, kind: CaseKind = "seen") -> list[Case]:
    """Evaluation cases: fillers that training never saw, in seen or in unseen phrasings.

    Args:
        seed: The same seed gives the same cases.
        n: How many.
        kind: ``seen`` for written training templates, ``unseen`` for held-out ones, ``fresh`` for
            those that were written after training's texts were fixed; ``_tools`` for tool calls
            instead of extractions; ``wide`` for what training draws its extractions from: mostly
            texts made by grammar.
    """
    if kind not in get_args(CaseKind):
        raise ValueError(f"kind {kind!r} is not one of {', '.join(get_args(CaseKind))}")
    rng = Random(seed)
    if kind == "wide":
        wide = WideCases(rng, held_out_fillers=True)
        return [wide.extraction() for _ in range(n)]
    if kind == "fresh":
        fresh = CaseMaker(rng, True, True, fresh_library())
        return [fresh.extraction() for _ in range(n)]
    maker = CaseMaker(rng, True, kind.startswith("unseen"))
    draw = maker.tool_call if kind.endswith("tools") else maker.extraction
    return [draw() for _ in range(n)]


def held_out_choices(seed: int, n: int) -> list[Choice]:
    """Yes/no and choice questions about texts with fillers that training never saw."""
    questions = Questions(Random(seed), held_out_fillers=True)
    return [questions.about_text() for _ in range(n)]
