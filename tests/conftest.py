"""Threads are held to two, and the bases that many tests share are built once."""

from __future__ import annotations

import os

# Read when torch and tokenizers are first imported.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
import torch

from tests.tiny import scripted_base, tiny_base

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def llama_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with grouped-query attention and an untied head."""
    return tiny_base(tmp_path_factory.mktemp("bases") / "llama")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that writes printable ASCII in order, and never stops by itself."""
    return scripted_base(tmp_path_factory.mktemp("bases") / "scripted")
