"""The embedded model's tokenizer: byte-level BPE, and its Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from examples.embedded_model.data import (
    ASSISTANT,
    BOS,
    END,
    PAD,
    SPECIAL_TOKENS,
    SYSTEM,
    TOOL,
    USER,
    DocumentMaker,
)
from overlap_spec.training.export import write_json

VOCAB_SIZE = 2048
# Words that are hardly ever a value: they take the space before them along.
_WITH_SPACE = (
    "a about after all also am an and any are as at be because been before but by can cost could "
    "costs day days did do does each every find first for from get gets had half has have he her "
    "his hour hours how if in into is it its left less long make makes many minutes money more "
    "most much need needs not now number of off on one only or other our out over paid pay per "
    "she should so some spend spent take takes than that the their them then there these they "
    "this three time times to total twice two up use used was we week weeks were what when where "
    "which who will with worth would year years you your"
)
# Any other word is the same tokens after a space, a quote and a dot, so that copying a name, a
# word or an e-mail address from a text into JSON is copying tokens.
_PIECES = (
    rf" ?(?:{_WITH_SPACE.replace(' ', '|')})(?!\p{{L}})"
    r"|\p{N}|\p{Ll}+|\p{Lu}\p{Ll}*|\p{L}+|\s|[^\s\p{L}\p{N}]+"
)

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{%- if tools or system %}" + SYSTEM + "{{- system }}"
    "{%- if tools %}{{- '\\n' if system else '' }}{{- 'Tools:' }}"
    "{%- for tool in tools %}"
    "{%- set f = tool.function if tool.function is defined else tool %}"
    "{{- '\\n' + f.name + '(' }}"
    "{{- ((f.parameters or {}).properties or {}) | join(', ') }}"
    "{{- '): ' + (f.description or '') }}"
    "{%- endfor %}{%- endif %}" + END + "{%- endif %}"
    "{%- for message in messages %}"
    f"{{%- if message.role == 'user' %}}{USER}{{{{- message.content }}}}{END}"
    f"{{%- elif message.role == 'tool' %}}{TOOL}{{{{- message.content }}}}{END}"
    f"{{%- elif message.role == 'assistant' %}}{ASSISTANT}{{{{- message.content or '' }}}}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- set f = call.function if call.function is defined else call %}"
    '{{- \'{"name":"\' + f.name + \'","arguments":\' }}'
    "{{- f.arguments if f.arguments is string else f.arguments | tojson(separators=(',', ':')) }}"
    "{{- '}' }}"
    "{%- endfor %}" + END + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}" + ASSISTANT + "{%- endif %}"
)


def corpus(seed: int, documents: int, gsm8k: list[tuple[str, str]]) -> Iterable[str]:
    """Plain text of training documents, special tokens removed."""
    maker = DocumentMaker(Random(seed), gsm8k)
    for _ in range(documents):
        for text, _ in maker.make(warm_up=False):
            for token in SPECIAL_TOKENS:
                text = text.replace(token, "\n")
            yield text


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE over ``texts``; ids of the special tokens come first.

    Single digits, a space of its own but before the words that take it along, every byte
    representable.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, special_id(tokenizer, BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[bos]
    )
    return tokenizer


def moved_rows(rows: Tensor, old: Tokenizer, new: Tokenizer) -> Tensor:
    """The rows of an embedding ``(V, H)`` for another vocabulary: float ``(V', H)``.

    A token that the old vocabulary has, with or without a space before it, keeps its row; another
    gets the mean of the rows of its old tokens.
    """
    known = old.get_vocab()
    moved = rows.new_zeros(new.get_vocab_size(), rows.shape[1])
    for token, index in new.get_vocab().items():
        same = next((t for t in (token, f"\u0120{token}") if t in known), None)
        if same is not None:
            moved[index] = rows[known[same]]
            continue
        text = new.decoder.decode([token])
        ids = old.encode(text, add_special_tokens=False).ids
        moved[index] = rows[ids].mean(0)
    return moved


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a special token; KeyError where the tokenizer lacks it."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"the tokenizer has no {token}")
    return int(found)


def save_tokenizer(tokenizer: Tokenizer, out: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with the chat template."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, TOOL],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", config)
