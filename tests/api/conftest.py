"""One server and one adapter for all tests that leave them as they found them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.api.asking import staged
from tests.api.server import Running, serving, until
from tests.tiny import signature_adapter


@pytest.fixture(scope="session")
def server(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serves the scripted base as `tiny`: it writes printable ASCII in order."""
    with serving(scripted, tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="session")
def adapter(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the scripted base that always writes "9"."""
    return signature_adapter(scripted, tmp_path_factory.mktemp("adapters") / "nine", 60)


@pytest.fixture
def files(adapter: Path) -> dict[str, bytes]:
    return {name: (adapter / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}


@pytest.fixture
def clean(server: Running) -> Iterator[None]:
    """The test leaves no adapter and no staged file behind."""
    yield
    for record in server.client.get("/v1/adapters").json()["data"]:
        server.client.delete(f"/v1/adapters/{record['name']}").raise_for_status()
    until(lambda: not staged(server), 5)
