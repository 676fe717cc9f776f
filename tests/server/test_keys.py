"""Who may do what: keys from files, one's own requests, administration, secrets."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from overlap_spec.children import without_secrets
from overlap_spec.errors import ConfigError
from overlap_spec.server.keys import Keys, network_of
from overlap_spec.server.settings import ServerSettings
from tests.support.serving import FIXED, Server, children, wait_for
from tests.support.tiers import few

ANNA, BERT, ROOT = ({"Authorization": f"Bearer {key}"} for key in ("anna", "bert", "root"))
PAGE = "https://page.example"
ENDLESS = {"text": "go", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}


@pytest.fixture(scope="module", params=few(["own"]))
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text("# clients\nanna\n\n  bert \n")
    (folder / "admin").write_text("root\n")
    os.environ["OVERLAP_SPEC_API_KEY"] = "hidden-from-children"
    try:
        files = ("--api-key-file", str(folder / "keys"))
        files += ("--admin-api-key-file", str(folder / "admin"))
        made = Server(*FIXED, *files, "--cors-origin", PAGE)
    finally:
        del os.environ["OVERLAP_SPEC_API_KEY"]
    made.headers = ROOT
    yield made
    made.kill()


@contextlib.contextmanager
def under_way(server: Server, rid: str, who: dict[str, str]) -> Iterator[Future[httpx.Response]]:
    """A request that runs until somebody aborts it."""
    asked = server.later("/generate", ENDLESS | {"rid": rid}, who)
    wait_for(lambda: server.state()["running"] == 1)
    yield asked
    abort(server, {"abort_all": True}, ROOT)
    assert asked.result(20).json()["meta_info"]["finish_reason"]["type"] == "abort"
    server.settle()


def test_each_rid_of_a_list_is_aborted_by_itself(server: Server) -> None:
    length = {"max_new_tokens": 4000, "ignore_eos": True}
    short = {"max_new_tokens": 1}
    body: dict[str, Any] = {"text": ["a", "b", "c"], "rid": ["one", "two", "three"]}
    body |= {"sampling_params": [length | {"n": 2}, length, short]}
    asked = server.later("/generate", body, ANNA)
    wait_for(lambda: server.state()["running"] == 3)
    for rid in ("one", "two"):
        again = {"text": "a", "rid": rid, "sampling_params": short}
        refused = server.post("/generate", again, ANNA)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "rid")
        assert abort(server, {"rid": rid}, BERT).json() == {"aborted": 0}
    assert abort(server, {"rid": "two"}, ANNA).json() == {"aborted": 1}
    wait_for(lambda: server.state()["running"] == 2)
    assert abort(server, {"rid": "three"}, ANNA).json() == {"aborted": 0}
    assert abort(server, {"rid": "one"}, ANNA).json() == {"aborted": 2}
    replies = asked.result(20).json()
    assert [each["meta_info"]["id"] for each in replies] == ["one", "one-1", "two", "three"]
    reasons = [each["meta_info"]["finish_reason"]["type"] for each in replies]
    assert reasons == ["abort", "abort", "abort", "length"]
    server.settle()
    assert abort(server, {"rid": "one"}, ANNA).json() == {"aborted": 0}


def test_two_prompts_do_not_share_an_id(server: Server) -> None:
    body = {"text": ["a", "b"], "rid": ["same", "same"]}
    reply = server.post("/generate", body, ANNA)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "rid")


def abort(server: Server, body: dict[str, Any], who: dict[str, str]) -> httpx.Response:
    return server.post("/abort_request", body, who)


def test_every_key_of_the_files_is_accepted(server: Server) -> None:
    for who, status in ((ANNA, 200), (BERT, 200), (ROOT, 200), ({}, 401)):
        assert httpx.get(server.url + "/v1/models", headers=who).status_code == status
    for wrong in ("Bearer # clients", "Basic anna"):
        reply = httpx.get(server.url + "/v1/models", headers={"Authorization": wrong})
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_rid_in_use_is_not_taken_over(server: Server) -> None:
    with under_way(server, "same", ANNA):
        again = ENDLESS | {"rid": "same"}
        reply = server.post("/generate", again, ANNA)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "rid")
        # Another client's is another one.
        short = {"text": "a", "rid": "same", "sampling_params": {"max_new_tokens": 1}}
        reply = server.post("/generate", short, BERT)
        assert reply.status_code == 200
        assert abort(server, {"rid": "same"}, ANNA).json() == {"aborted": 1}
    reply = server.post("/generate", short, ANNA)
    assert reply.status_code == 200


def test_administration_has_a_key_of_its_own(server: Server) -> None:
    with under_way(server, "long", ANNA) as asked:
        refused = abort(server, {"abort_all": True}, ANNA)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_admin")
        assert not asked.done()
        assert abort(server, {"rid": "long"}, ROOT).json() == {"aborted": 1}


def test_where_others_requests_stand_is_the_administrators_to_see(server: Server) -> None:
    def asked(who: dict[str, str]) -> Any:
        return httpx.get(server.url + "/requests", headers=who, timeout=20).json()

    assert httpx.get(server.url + "/requests", timeout=20).status_code == 401
    with under_way(server, "secret-rid", ANNA):
        wait_for(lambda: asked(ROOT)["requests"])
        (own,) = asked(ANNA)["requests"]
        assert (own["id"], own["own"]) == ("secret-rid", True)
        others = asked(BERT)
        assert (others["requests"], others["not_shown"]) == ([], 1)
        assert others["totals"]["running"] == 1
        assert "secret-rid" not in json.dumps(others)
        (seen,) = asked(ROOT)["requests"]
        assert (seen["id"], seen["own"], asked(ROOT)["is_admin"]) == ("secret-rid", False, True)
        assert re.fullmatch("key [0-9a-f]{8}", seen["client"])
        assert "anna" not in json.dumps(seen)


def test_children_know_no_secret(server: Server) -> None:
    pids = children(server.process.pid)
    assert len(pids) >= 2
    for pid in pids:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"PATH=" in environment
        assert b"hidden-from-children" not in environment
    info = server.get("/server_info").json()["server"]
    assert info["api_key"] == "set"
    assert info["admin_api_key"] is None
    assert "hidden-from-children" not in server.get("/server_info").text


def test_a_key_is_taken_from_either_header(server: Server) -> None:
    body = {"max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/messages", "/v1/chat/completions"):
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "anna"}, 200),
            (ANNA, 200),
            ({"x-api-key": "Anna"}, 401),
            ({"x-api-key": "Bearer anna"}, 401),
            ({"authorization": "Bearer no", "x-api-key": "anna"}, 401),
        ):
            reply = server.post(path, body, headers)
            assert reply.status_code == status, (path, headers)
            if status == 401 and path == "/v1/messages":
                assert reply.json()["error"]["type"] == "authentication_error"


def test_clients_in_pages_may_send_headers_of_their_own(server: Server) -> None:
    asked = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    headers = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": asked,
    }
    url = f"{server.url}/v1/chat/completions"
    allowed = httpx.options(url, headers=headers)
    other = httpx.options(url, headers=headers | {"origin": "https://other.example"})
    refused = httpx.post(url, json={}, headers={"origin": PAGE})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert set(asked.split(",")) <= set(
        allowed.headers["access-control-allow-headers"].replace(" ", "").lower().split(",")
    )
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers
    # A page may read why it was refused.
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def cached(server: Server, who: dict[str, str], **more: Any) -> int:
    """Tokens of a prompt that a request found computed."""
    text = "what one client asks, another one may not learn " * 8
    body = {"text": text, "sampling_params": {"max_new_tokens": 1}, **more}
    reply = server.post("/generate", body, who)
    count: int = reply.json()["meta_info"]["cached_tokens"]
    return count


def test_what_was_computed_for_a_key_is_for_it_alone(server: Server) -> None:
    assert cached(server, ANNA) == 0
    assert cached(server, ANNA) > 0
    assert cached(server, BERT) == 0
    assert cached(server, BERT) > 0
    # A salt that both know is shared on purpose.
    assert cached(server, ANNA, cache_salt="ours") == 0
    assert cached(server, BERT, cache_salt="ours") > 0
    # No salt is a key's.
    assert cached(server, BERT, cache_salt="key anna") == 0


def test_names_of_secrets() -> None:
    given = {
        "OVERLAP_SPEC_API_KEY": "x", "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "APIKEY": "x",
        "DB_PASSWORD": "x", "PATH": "y", "TOKENIZERS_PARALLELISM": "y", "KEYBOARD": "y",
        "OMP_NUM_THREADS": "y", "PGPASSWORD": "x", "MYSQL_PWD": "x", "SMTP_PASS": "x", "PWD": "y",
        "MYAPPSECRETS": "x", "GITHUB_PAT": "x", "COMPASS": "y",
    }  # fmt: skip
    assert set(without_secrets(given).values()) == {"y"}
    assert len(without_secrets(given)) == 6


@pytest.mark.parametrize(
    ("value", "is_secret"),
    [
        ("postgres://user:pw@host/db", True),
        ("redis://:pw@host:6379/0", True),
        ("https://ghp_123@github.com/x.git", True),
        ("mysql://user:a/b#c@host/db", True),
        ("host=db user=me password=pw", True),
        ("AccountName=me;AccountKey=abc==;Suffix=x", True),
        ("http://proxy:3128", False),
        ("https://host/@scope/package", False),
        ("/usr/bin:/bin", False),
    ],
)
def test_values_that_hold_secrets(value: str, is_secret: bool) -> None:
    assert without_secrets({"URL": value}) == ({} if is_secret else {"URL": value})


def test_without_keys_a_client_is_its_address() -> None:
    keys = Keys(ServerSettings())
    assert not keys.are_asked_for
    assert keys.owner(b"", "10.0.0.1") != keys.owner(b"", "10.0.0.2")
    assert keys.owner(b"Bearer any", "10.0.0.1") == keys.owner(b"", "10.0.0.1")
    assert not keys.is_admin(b"Bearer any")


def test_an_address_counts_as_its_network() -> None:
    """Of IPv6 one machine takes as many as it likes."""
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") == "2001:db8:0:1::/64"
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("testclient") == "testclient"


def test_files_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match=rf"api_key_file {file}: no such file or directory$"):
        Keys(ServerSettings(api_key_file=file))
    file.write_text("# none\n\n")
    with pytest.raises(ConfigError, match=r"admin_api_key_file .*has no key"):
        Keys(ServerSettings(admin_api_key_file=file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="api_key_file"):
        Keys(ServerSettings(api_key_file=file))
