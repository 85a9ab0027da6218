"""What the pages say exists, and what exists is on the pages."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import fields
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from starlette.routing import Route

from api import schemas
from api.app import ROUTES
from api.errors import FAULTS, fault_of
from api.metrics import Metrics
from api.schemas import NEUTRAL, ChatRequest, CompletionRequest
from api.settings import ENV_PREFIX, Settings
from base_engine.config import EngineConfig
from scripts.serve import DEMO_ADAPTERS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()
PAGES = ("README.md", "CONTRIBUTING.md", "docs/api.md", "docs/parity.md")
CODE = re.compile(r"`([a-z_]+)`")


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


def test_the_table_of_errors_has_every_status_and_code() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (.*) \|$", API, re.MULTILINE)
    listed = {(int(status), code) for status, text in rows for code in CODE.findall(text)}
    faults = [fault for _, fault in FAULTS] + [fault_of(Exception())]
    wanted = {(fault.status, fault.code) for fault in faults if fault.code}
    assert wanted <= listed
    raised = codes_raised()
    assert "unknown_parameter" in raised and "adapter_not_found" in raised
    assert raised <= {code for _, code in listed}
    assert {code for _, code in listed} <= raised | {code for _, code in wanted} | {
        "method_not_allowed"  # Starlette's own
    }


def codes_raised() -> set[str]:
    """The codes that errors of the HTTP layer are given where they are raised."""
    return {
        code.value
        for path in (ROOT / "api").glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("BadRequest", "Missing")
        for code in [*call.args[2:3], *(k.value for k in call.keywords if k.arg == "code")]
        if isinstance(code, ast.Constant) and isinstance(code.value, str)
    }


def test_the_table_of_metrics_is_the_list_of_metrics() -> None:
    metrics = Metrics()
    metrics.watch(MagicMock())  # names alone are looked at
    wanted = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in metrics.registry.collect()
    }
    assert set(re.findall(r"^\| `(lorikeet_\w+)` \|", API, re.MULTILINE)) == wanted


def test_limits_of_a_request_are_those_of_the_code() -> None:
    requests = API.partition("## Requests")[2].partition("## Uploads")[0]
    for row in (
        f"| `n` | 1 | 1 to {schemas.MAX_CHOICES}; at most {schemas.MAX_SEQUENCES} sequences",
        f"completions: {schemas.COMPLETION_DEFAULT_TOKENS} |",
        f"up to {schemas.MAX_STOPS}, of 1 to {schemas.MAX_STOP_CHARS} characters",
        f"| 1 to {schemas.MAX_MESSAGES}, with `role`",
        f"up to {schemas.MAX_PROMPTS} of either",
        f"`limit` is 1 to {EngineConfig().steps_kept}.",
    ):
        assert row in requests


def test_commands_and_files_that_the_pages_name_exist() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text()
        for path in set(re.findall(r"(?<![\w/])(?:scripts|tests|docs)/[\w./-]+\b", text)):
            assert (ROOT / path).exists(), f"{page} names {path}"
    commands = "serve test check setup check_adapter train_persona parity_table bench_serving"
    for command in commands.split():
        assert os.access(ROOT / "scripts" / command, os.X_OK)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_flags_that_the_readme_names_exist() -> None:
    known = {"--" + field.name.replace("_", "-") for field in fields(Settings)}
    known |= {"--help", "--data", "--out", "--quick", "--convert"}
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
