"""Requests as clients of vLLM and SGLang send them: taken, held, or let go with a warning."""

import json
import re
from typing import Any

import pytest

from tests.support.serving import Server, error_of

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
SAID = "Maria Lopez is 34 years old and lives in Lisbon."
# What asks for nothing.
NEUTRAL: dict[str, Any] = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "best_of": 1,
    "skip_special_tokens": True,
    "top_k": 0,
    "no_stop_trim": False,
    "truncate_prompt_tokens": None,
    "lora_path": None,
    "nobody_knows_this": None,
}


def ask(server: Server, path: str, **more: Any) -> Any:
    """The reply, as a whole."""
    fields = {"temperature": 0, "seed": 1} | more
    if path == GENERATE:
        own = {name: fields.pop(name) for name in ("rid", "logprob_start_len") if name in fields}
        fields["max_new_tokens"] = fields.pop("max_tokens", 24)
        fields["sampling_seed"] = fields.pop("seed")
        body: dict[str, Any] = {"text": SAID, "sampling_params": fields, **own}
    else:
        asked = [{"role": "user", "content": SAID}]
        given = {"messages": asked} if path == CHAT else {"prompt": SAID}
        body = {"max_tokens": 24} | given | fields
    return server.ask(path, body)


def text(server: Server, path: str, **more: Any) -> str:
    reply = ask(server, path, **more)
    if path == GENERATE:
        return str(reply["text"])
    choice = reply["choices"][0]
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE])
def test_values_that_ask_for_nothing_change_nothing(server: Server, path: str) -> None:
    fields = dict(NEUTRAL)
    if path == GENERATE:
        for name in ("use_beam_search", "length_penalty", "best_of"):
            del fields[name]
        fields["logprob_start_len"] = -1
    assert text(server, path, **fields) == text(server, path)


@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE])
def test_what_ends_and_bounds_a_text_is_held(server: Server, path: str) -> None:
    free = text(server, path)
    end = re.search("[aeiou][^aeiou]", free)
    assert end
    assert text(server, path, stop_regex="[aeiou][^aeiou]") == free[: end.end()]
    stop = free[4:6]
    whole = free[: free.index(stop) + 2]
    assert text(server, path, stop=[stop]) + stop == whole
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        assert text(server, path, stop=[stop], **{name: True}) == whole
    ids = server.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"]
    assert set(text(server, path, allowed_token_ids=ids, max_tokens=3)) == {"a"}
    names = "(Maria|Lopez) is"
    assert text(server, path, regex=names) == "Maria is"
    banned = ["M", "Ma", "Mar", "Mari", "Maria"]
    assert text(server, path, regex=names, bad_words=banned) == "Lopez is"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_replies_have_the_ids_that_clients_give(server: Server, path: str) -> None:
    prefix = "chatcmpl-" if path == CHAT else "cmpl-"
    assert ask(server, path, request_id="mine", max_tokens=1)["id"] == prefix + "mine"
    assert ask(server, path, rid="mine", max_tokens=1)["id"] == "mine"
    longest = "x" * 256
    assert ask(server, path, rid=longest, n=2, max_tokens=1)["id"] == longest
    assert ask(server, GENERATE, rid=longest, max_tokens=1)["meta_info"]["id"] == longest


def test_a_backend_is_the_servers_own_choice(server: Server) -> None:
    """As guidance's model for vLLM asks: one constraint under two names, and a backend."""
    grammar = 'start: "yes" | "no"'
    both = {"guided_grammar": grammar, "structured_outputs": {"grammar": grammar}}
    choice = ask(server, CHAT, guided_decoding_backend="guidance", **both)["choices"][0]
    assert choice["message"]["content"] in ("yes", "no")
    other = {"guided_grammar": grammar, "structured_outputs": {"grammar": 'start: "maybe"'}}
    body = {"messages": [{"role": "user", "content": SAID}], **other}
    assert "send one constraint" in error_of(server.post(CHAT, body))["message"]


def test_variables_that_the_template_does_not_read_are_let_go(server: Server) -> None:
    many = {f"nobody_reads_{n}_" + "x" * 200: n for n in range(200)}
    free = ask(server, CHAT)["choices"][0]
    for given, said in (
        ({"thinking": True, "messages": []}, "thinking, messages"),
        (many, "and 196 more"),
    ):
        choice = ask(server, CHAT, chat_template_kwargs=given)["choices"][0]
        assert choice["message"] == free["message"]
        (warning,) = choice["warnings"]
        assert said in warning


@pytest.mark.ci
def test_choices_together_repeat_a_bounded_part_of_a_request(server: Server) -> None:
    words = " ".join(["Lisbon"] * 400)
    body: dict[str, Any] = {"prompt": [words] * 4, "max_tokens": 1}
    tokens = ask(server, TEXT, **body, prompt_logprobs=0)["usage"]["prompt_tokens"]
    top = 2**18 // (tokens * 16)
    refused = server.post(TEXT, body | {"n": 16, "prompt_logprobs": min(top + 1, 20)})
    if top < 20:
        assert error_of(refused)["param"] == "prompt_logprobs"
    texts = [str(number) + "x" * 30_000 for number in range(2)]
    weighed = {"choice": texts, "probabilities": True}
    chat = {"messages": [{"role": "user", "content": SAID}], "n": 100, "max_tokens": 1}
    error = error_of(server.post(CHAT, chat | {"structured_outputs": weighed}))
    assert error["param"] == "structured_outputs.choice"
    assert len(json.dumps(error)) < 1000
