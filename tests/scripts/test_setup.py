"""Setting up: the environment is filled once, again when its inputs change, and never half."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.setup import DEV, USE, Environment, requirements

ROOT = Path(__file__).resolve().parents[2]
SHELL_FILES = sorted(
    path
    for path in (*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run")
    if path.is_file() and path.suffix in ("", ".sh")
)


@pytest.mark.parametrize("path", SHELL_FILES, ids=lambda path: path.name)
def test_shell_scripts_are_valid_and_can_be_run(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")


def checkout(folder: Path) -> Path:
    """A project whose needs lie beside it as wheels, so that no index is asked."""
    (folder / "scripts").mkdir(parents=True)
    for name in ("setup", "setup.py"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts" / name)
    tiny, tool = (f"{name} @ {write_wheel(folder, name)}" for name in ("tiny", "tool"))
    write_project(folder, [tiny], [tool])
    (folder / "constraints.txt").write_text("")
    return folder


def write_wheel(folder: Path, name: str) -> str:
    """An installable module; returns its file's URL."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", "")
        info = f"{name}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    return wheel.as_uri()


def write_project(folder: Path, dependencies: list[str], dev: Sequence[str] = ()) -> None:
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "thing"\nversion = "1"\ndependencies = {dependencies!r}\n'
        f"[project.optional-dependencies]\ndev = {[*dev]!r}\n"
    )


def start(folder: Path, *flags: str, python: str = sys.executable) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHON": python, "PIP_NO_INDEX": "1"}
    command = [str(folder / "scripts" / "setup"), *flags]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def set_up(folder: Path, *flags: str, python: str = sys.executable) -> tuple[int, str]:
    """Exit status and messages of one set-up."""
    process = start(folder, *flags, python=python)
    messages = process.communicate()[1]
    return process.returncode, messages


def has(folder: Path, module: str) -> bool:
    python = folder / ".venv" / "bin" / "python"
    command = [str(python), "-c", f"import {module}"]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def test_the_environment_is_made_once_and_again_when_it_must(tmp_path: Path) -> None:
    """One journey, since each environment takes seconds to make."""
    folder = checkout(tmp_path / "a checkout")
    both = [start(folder), start(folder)]
    messages = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], messages
    assert sum("Making a virtual environment" in text for text in messages) == 1
    assert has(folder, "tiny") and not has(folder, "tool")

    assert set_up(folder) == (0, "")

    # What tests need comes on top, and is enough for all else.
    status, text = set_up(folder, "--dev")
    assert status == 0, text
    assert "tool" in text and "Making a virtual environment" not in text
    assert has(folder, "tool")
    assert set_up(folder, "--dev") == set_up(folder) == (0, "")

    # Once there it is kept up to date, whoever starts the set-up.
    (folder / "constraints.txt").write_text("tiny<2\n")
    assert set_up(folder)[0] == 0
    assert set_up(folder, "--dev") == (0, "")

    good = (folder / "pyproject.toml").read_text()
    write_project(folder, ["no-such-package-anywhere"])
    status, text = set_up(folder)
    assert status == 1
    assert "error: pip could not install" in text
    assert "Traceback" not in text

    # What a failed or killed set-up left is not trusted.
    (folder / "pyproject.toml").write_text(good)
    status, text = set_up(folder)
    assert status == 0, text
    assert "Making a virtual environment" in text
    assert has(folder, "tiny")


def test_an_unsuitable_python_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    status, text = set_up(folder, python=str(old))
    assert status == 1
    assert "3.11" in text
    assert not (folder / ".venv").exists()


def test_the_stamp_depends_on_both_files(tmp_path: Path) -> None:
    environment = Environment(checkout(tmp_path))
    stamps = {environment.wanted()}
    for name in ("pyproject.toml", "constraints.txt"):
        with (tmp_path / name).open("a") as file:
            file.write("\n# more\n")
        stamps.add(environment.wanted())
    assert len(stamps) == 3


def test_requirements_are_those_of_the_project_and_its_extras(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(
        '[project]\nname = "thing"\ndependencies = ["a>=1"]\n'
        '[project.optional-dependencies]\nx = ["b"]\nall = ["thing[x]", "c; os_name == \'z\'"]\n'
    )
    assert requirements(pyproject, ["x"]) == ["a>=1", "b"]
    assert requirements(pyproject, ["x", "all"]) == ["a>=1", "b", "c; os_name == 'z'"]


def test_serving_needs_no_tools_of_the_developers() -> None:
    pyproject = ROOT / "pyproject.toml"
    for_use, for_work = (" ".join(requirements(pyproject, extras)) for extras in (USE, DEV))
    for tool in ("pytest", "mypy", "ruff", "hypothesis"):
        assert tool not in for_use and tool in for_work


def test_an_unknown_flag_is_refused(tmp_path: Path) -> None:
    status, text = set_up(checkout(tmp_path), "--all")
    assert status == 2
    assert "--all" in text and "--dev" in text
    assert not (tmp_path / ".venv").exists()


def test_everything_the_project_needs_is_pinned() -> None:
    pins = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    for line in requirements(ROOT / "pyproject.toml", DEV):
        name = line.split(";")[0].split("[")[0]
        for sign in "<>=!~":
            name = name.split(sign)[0]
        assert name.strip().lower().replace("_", "-") in pins
