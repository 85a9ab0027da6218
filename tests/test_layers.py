"""Who may import whom: scripts → api → registry | base_engine → adapters."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: Folder -> what its files may import of the project; a dotted name allows that module only.
ALLOWED = {
    "scripts": {"scripts", "api", "registry", "base_engine", "adapters"},
    "api": {"api", "registry", "base_engine", "adapters"},
    "registry": {"registry", "adapters.manifest", "adapters.errors"},
    "base_engine": {"base_engine", "adapters"},
    "adapters": {"adapters"},
}


def violations(folder: str, source: str) -> list[str]:
    """What `source`, a file of `folder`, imports against the order, wherever in it that stands."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                found.append(f"line {node.lineno}: relative import")
                continue
            # `from adapters import pool` imports the module adapters.pool.
            package = node.module or ""
            names = [package] if "." in package else [f"{package}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found += [f"line {node.lineno}: {name}" for name in names if not _allowed(folder, name)]
    return found


def _allowed(folder: str, name: str) -> bool:
    top = name.partition(".")[0]
    if top == "tests":
        return False
    allowed = ALLOWED[folder]
    return top not in ALLOWED or top in allowed or name in allowed


@pytest.mark.parametrize("folder", ALLOWED)
def test_every_import_follows_the_order(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {
        str(file.relative_to(ROOT)): lines
        for file in files
        if (lines := violations(folder, file.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("adapters", "import base_engine.config"),
        ("adapters", "from registry.errors import NotFound"),
        ("base_engine", "def f():\n    from registry import keys"),
        ("base_engine", "import api"),
        ("registry", "from base_engine.request import Trace"),
        ("registry", "from adapters.pool import AdapterPool"),
        ("registry", "from adapters import pool"),
        ("registry", "import adapters"),
        ("api", "import scripts.serve as s"),
        ("scripts", "from tests.tiny import tiny_base"),
        ("api", "from . import settings"),
    ],
)
def test_a_forbidden_import_is_found(folder: str, source: str) -> None:
    assert violations(folder, source)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("registry", "from adapters.manifest import AdapterManifest\nimport json"),
        ("registry", "from adapters import errors"),
        ("base_engine", "from adapters.pool import AdapterPool"),
        ("scripts", "from registry import keys"),
    ],
)
def test_an_allowed_import_is_left_alone(folder: str, source: str) -> None:
    assert violations(folder, source) == []


def test_the_registry_works_without_torch() -> None:
    modules = [
        "registry." + ".".join(file.relative_to(ROOT / "registry").with_suffix("").parts)
        for file in sorted((ROOT / "registry").rglob("*.py"))
        if file.name != "__init__.py"
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
