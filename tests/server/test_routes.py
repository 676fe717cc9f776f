"""Routes about the server, other origins, and TLS."""

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from overlap_spec.errors import ConfigError
from overlap_spec.server.run import tls_context
from overlap_spec.server.settings import ServerSettings
from tests.support.serving import FIXED, MOST_TURN_S, Server, shared_server


def test_routes_under_the_names_of_other_servers() -> None:
    server = shared_server()
    assert server.get("/version").json() == {"version": metadata.version("overlap-spec")}
    assert server.get("/ping").json() == server.get("/health").json()
    info = server.get("/get_model_info").json()
    assert info["is_generation"] is True
    assert info["max_model_len"] == 4096
    assert set(server.get("/get_server_info").json()) == set(server.get("/server_info").json())


def test_a_head_is_a_get_without_its_body() -> None:
    server = shared_server()
    for path in ("/health", "/", "/v1/models", "/nonesuch"):
        head, get = httpx.head(server.url + path), server.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-length"] == str(len(get.content))
    refused = httpx.head(server.url + "/generate")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    message = server.get("/generate").json()["error"]["message"]
    assert message == "there is no GET /generate: this path takes POST"


def test_the_reference_page_shows_the_document() -> None:
    page = shared_server().get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/openapi.json" in page.text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(chain)]
    subprocess.run(command, check=True, capture_output=True)
    return chain, key


@pytest.fixture(scope="module")
def encrypted(certificate: tuple[Path, Path]) -> Iterator[Server]:
    chain, key = map(str, certificate)
    limits = ("--max-connections", "4", "--header-timeout-s", "600")
    server = Server(*FIXED, "--ssl-certfile", chain, "--ssl-keyfile", key, *limits)
    yield server
    server.kill()


@pytest.mark.ci
def test_it_speaks_https(encrypted: Server, certificate: tuple[Path, Path]) -> None:
    assert encrypted.url.startswith("https://127.0.0.1:")
    url, body = f"{encrypted.url}/v1/completions", {"prompt": "x", "regex": "abc"}
    with httpx.Client(verify=str(certificate[0]), timeout=60) as client:
        assert client.post(url, json=body).json()["choices"][0]["text"] == "abc"
        large = body | {"prompt": "x" * 10**6}
        assert client.post(url, json=large).status_code == 400
        shown = client.get(f"{encrypted.url}/server_info").json()["server"]
        assert shown["ssl_keyfile"] == "set"
        # Such chunks are refused within the turn that reads them.
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            client.post(url, content=(b"x" for _ in range(20_000))).raise_for_status()
        worst = [
            float(line.split()[1])
            for line in client.get(f"{encrypted.url}/metrics").text.splitlines()
            if line.startswith("overlap_spec:front_turn_worst_seconds ")
        ]
    plain = encrypted.url.replace("https", "http")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{plain}/health")
    assert worst[0] < MOST_TURN_S


@pytest.mark.ci
def test_silent_handshakes_count_as_connections(
    encrypted: Server, certificate: tuple[Path, Path]
) -> None:
    where = urlsplit(encrypted.url)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((where.hostname, where.port), 20))
            for _ in range(8)
        ]
        # The first ones have made room.
        for client in silent[:4]:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        with httpx.Client(verify=str(certificate[0]), timeout=20) as client:
            assert client.get(f"{encrypted.url}/health").status_code == 200


def test_a_certificate_that_cannot_be_used_is_named(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    chain, key = certificate
    tls_context(ServerSettings(ssl_certfile=chain, ssl_keyfile=key))
    missing, broken = tmp_path / "none.pem", tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for file in (missing, broken):
        with pytest.raises(ConfigError, match=f"ssl_certfile: cannot use {file}"):
            tls_context(ServerSettings(ssl_certfile=file))
    with pytest.raises(ConfigError, match="ssl_keyfile goes with ssl_certfile"):
        ServerSettings(ssl_keyfile=key)
