"""The server that most files share, and the playground's page in a browser."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.browser import Browser
from tests.support.playground import wait_for_run
from tests.support.serving import Server, shared_server


@pytest.fixture(scope="session")
def server() -> Server:
    """The one without flags, for files that have none of their own."""
    return shared_server()


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    """OpenAI's client of it."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser of the file's own."""
    with Browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The page, freshly opened, after the run of its first example; every request that it makes
    stays with the server."""
    url = shared_server().url
    browser.events.clear()
    browser.open(url + "/")
    wait_for_run(browser)
    urls = [event["request"]["url"] for event in browser.told("Network.requestWillBeSent")]
    assert url + "/v1/chat/completions" in urls
    browser.events.clear()
    yield browser
    browser.call("Emulation.clearDeviceMetricsOverride")
    urls += [event["request"]["url"] for event in browser.told("Network.requestWillBeSent")]
    assert [each for each in urls if not each.startswith((url + "/", "data:"))] == []
    assert browser.told("Runtime.exceptionThrown") == []
