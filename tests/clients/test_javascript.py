"""The JavaScript clients of OpenAI and Anthropic under node, where ``NODE_PATH`` has them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.questions import Pair
from tests.support.serving import Server

SCRIPT = Path(__file__).parent / "javascript.cjs"
NODE = shutil.which("node")
PACKAGES = {"openai": "openai", "anthropic": "@anthropic-ai/sdk"}
LAST = {"openai": "response.completed", "anthropic": "message_stop"}


@pytest.mark.parametrize("which", PACKAGES)
def test_the_client(server: Server, which: str) -> None:
    if NODE is None:
        pytest.skip("there is no node")
    find = [NODE, "-e", f"require.resolve('{PACKAGES[which]}')"]
    if subprocess.run(find, capture_output=True).returncode != 0:
        pytest.skip(f"node finds no {PACKAGES[which]}: npm install it, and set NODE_PATH")
    command = [NODE, str(SCRIPT), server.url, which]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    came = json.loads(done.stdout)
    assert len(set(came["texts"])) == 1
    assert came["texts"][0]
    assert came["events"][-1] in (LAST[which], "response.incomplete")
    for given in came["objects"]:
        Pair.model_validate(given)
