"""What the pages say exists, and what exists is on the pages."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from starlette.routing import Route

from api.app import ROUTES
from api.schemas import NEUTRAL, ChatRequest, CompletionRequest
from api.settings import ENV_PREFIX, Settings
from scripts.serve import DEMO_ADAPTERS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()
PAGES = ("README.md", "CONTRIBUTING.md", "docs/api.md")


def served() -> set[str]:
    return {
        f"{method} {re.sub(r':[a-z]+}', '}', route.path)}"
        for route in ROUTES
        for method in (route.methods or set()) - {"HEAD"}
        if isinstance(route, Route)
    }


def test_the_table_of_routes_is_the_list_of_routes() -> None:
    assert set(re.findall(r"^\| `([A-Z]+ /\S*)` \|", API, re.MULTILINE)) == served()


def test_the_table_of_settings_is_the_list_of_settings() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)` \| `([A-Z_]+)` \|", API, re.MULTILINE)
    names = [field.name for field in fields(Settings)]
    assert rows == [(f"--{n.replace('_', '-')}", ENV_PREFIX + n.upper()) for n in names]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_supported_option_is_listed(kind: type[ChatRequest | CompletionRequest]) -> None:
    requests = API.partition("## Requests")[2].partition("## Uploads")[0]
    missing = [
        name
        for name in kind.__struct_fields__
        if name not in NEUTRAL and not re.search(rf"`{name}(\.\w+)?`", requests)
    ]
    assert not missing


def test_commands_and_files_that_the_pages_name_exist() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text()
        for path in set(re.findall(r"(?<![\w/])(?:scripts|tests|docs)/[\w./-]+\b", text)):
            assert (ROOT / path).exists(), f"{page} names {path}"
    for command in ("serve", "test", "check", "setup", "train_persona"):
        assert os.access(ROOT / "scripts" / command, os.X_OK)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_flags_that_the_readme_names_exist() -> None:
    known = {"--" + field.name.replace("_", "-") for field in fields(Settings)}
    known |= {"--help", "--data", "--out"}
    assert set(re.findall(r"(?<!\w)--[a-z][a-z-]+", README)) <= known


def test_the_modules_that_the_readme_lists_exist() -> None:
    tree = README.partition("## What is where")[2].partition("The first line")[0]
    folder = ""
    for line in tree.splitlines():
        if top := re.match(r"    (\w+)/ ", line):
            folder = top[1]
        elif row := re.match(r"      (\S.*?)  ", line):
            for name in row[1].split(", "):
                path = ROOT / folder / name
                assert path.is_dir() or path.with_suffix(".py").is_file(), path


def test_the_demo_adapters_are_there() -> None:
    names = {path.parent.name for path in DEMO_ADAPTERS.glob("*/adapter_config.json")}
    assert names == {"pirate", "clerk", "haiku"}
    assert all(f"`{name}`" in README for name in names)
