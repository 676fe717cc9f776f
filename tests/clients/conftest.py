"""The server that all clients talk to."""

import pytest

from tests.support.serving import Server, shared_server


@pytest.fixture(scope="session")
def server() -> Server:
    return shared_server()
