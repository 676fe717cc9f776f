"""The server that all clients talk to."""

import pytest

from overlap_spec.config import EMBEDDED
from tests.support.serving import Server, shared_server


@pytest.fixture(scope="session")
def server() -> Server:
    if not (EMBEDDED / "target" / "model.safetensors").exists():
        pytest.skip("no embedded weights")
    return shared_server()
