"""The benchmarks' client, against a server that this file scripts and against our own."""

import pytest

from bench.backends.base import Task
from bench.client import ServerSystem
from overlap_spec.errors import ConfigError
from tests.support.serving import shared_server


def test_where_no_server_listens() -> None:
    with pytest.raises(ConfigError, match="lists no model"):
        ServerSystem("http://127.0.0.1:9")
    assert ServerSystem("http://127.0.0.1:9", "named").run([Task("Q")], 1).replies[0].error


@pytest.mark.ci
def test_our_own_server_is_measured() -> None:
    system = ServerSystem(f"{shared_server().url}/v1")
    batch = system.run([Task("Question: 1 + 1?\nAnswer:", max_tokens=8, raw=True)] * 3, 2)
    for reply in batch.replies:
        assert (reply.error, reply.text) == (None, batch.replies[0].text)
        assert 0 < reply.tokens <= 8
