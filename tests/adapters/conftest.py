from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from adapters.manifest import BaseSpec
from tests.adapters.lora_files import spec_of
from tests.tiny import make_adapter, tiny_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def spec(base: Path) -> BaseSpec:
    return spec_of(base)


@pytest.fixture(scope="session")
def pristine(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return make_adapter(base, folder, seed=1, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def adapter(pristine: Path, tmp_path: Path) -> Path:
    """An adapter of rank 4 on every q_proj and v_proj, to be spoiled by the test."""
    return Path(shutil.copytree(pristine, tmp_path / "adapter"))
