"""Fill .venv with the project's requirements. Standard library only: this runs before any install.

`scripts/setup` starts it with the Python of a usable .venv, or else with one to make .venv anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SetupError(Exception):
    """The environment could not be made; the message says what to do."""


class Environment:
    """The virtual environment of the checkout at `root`.

    `.stamp` in it holds a hash of all that it was made from; `.unfinished` is there while it is
    being filled, so that one left by a killed set-up is not trusted but made anew.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self._stamp = self.folder / ".stamp"
        self._unfinished = self.folder / ".unfinished"

    def wanted(self) -> str:
        """Hash of what the environment depends on: the two files, its place and its Python."""
        digest = hashlib.sha256()
        for name in ("pyproject.toml", "constraints.txt"):
            content = (self.root / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
        digest.update(f"{self.folder} {sys.version_info[:2]}".encode())
        return digest.hexdigest()

    def is_current(self) -> bool:
        if self._unfinished.exists() or not self.python.exists():
            return False
        return self._stamp.is_file() and self._stamp.read_text() == self.wanted()

    def install(self) -> None:
        """Bring the environment up to date, from the start where need be. Raises SetupError."""
        if Path(sys.prefix).resolve() != self.folder.resolve() or self._unfinished.exists():
            self._create()
        self._unfinished.touch()
        self._stamp.unlink(missing_ok=True)
        wanted = requirements(self.root / "pyproject.toml")
        _say(f"Installing {len(wanted)} requirements and what they need (minutes at first) …")
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        pinned = ["-c", str(self.root / "constraints.txt")]
        if subprocess.run([*pip, *pinned, *wanted], stdout=sys.stderr).returncode != 0:
            raise SetupError(
                "pip could not install the requirements; its own message is above. Check the "
                "network and pip's index settings, then run the same command again."
            )
        self._stamp.write_text(self.wanted())
        self._unfinished.unlink()
        _say("The environment is ready.")

    def _create(self) -> None:
        _say(f"Making a virtual environment in {self.folder} with {sys.executable} …")
        if self.folder.is_symlink():
            raise SetupError(f"{self.folder} is a symbolic link; remove it first.")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self._unfinished.touch()
        venv.EnvBuilder(with_pip=True, symlinks=True).create(self.folder)


def requirements(pyproject: Path) -> list[str]:
    """The project's dependencies and those of all its extras, without references to itself."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = [*project["dependencies"]]
    for extra in project.get("optional-dependencies", {}).values():
        lines += [line for line in extra if not line.startswith(f"{project['name']}[")]
    return lines


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the checkout's lock; the system lets go of it when this process ends, however."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("Waiting for another set-up of this checkout to end …")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(root: Path) -> int:
    environment = Environment(root)
    try:
        with _locked(root):
            if not environment.is_current():
                environment.install()
    except (SetupError, OSError, subprocess.CalledProcessError) as e:
        _say(f"error: {e}")
        return 1
    except KeyboardInterrupt:
        _say("Set-up was interrupted; the next run starts it again.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
