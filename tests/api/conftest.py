"""One server for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.server import Running, serving


@pytest.fixture(scope="session")
def server(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serves the scripted base as `tiny`: it writes printable ASCII in order."""
    with serving(scripted, tmp_path_factory.mktemp("data")) as running:
        yield running
