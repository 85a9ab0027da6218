"""Fill .venv with the project's requirements. Standard library only: this runs before any install.

`scripts/setup` starts it with the Python of a usable .venv, or else with one to make .venv anew.
`--dev` adds what tests and checks need; an environment that has it serves all else too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: Extras for serving and training, and for working on the project.
USE = ("demo", "train")
DEV = (*USE, "dev")

#: Seconds of silence from pip until a line says that it is still at work.
_HEARTBEAT_S = 20


#: What of pip's output is passed on: large downloads with their size, and the installation.
_NEWS = re.compile(
    r"(Downloading) (?:\S*/)?([^\s/]+?)-\d\S* (\(\S+ [MG]B\))"
    r"|(Building wheel|Installing collected packages)"
)


class SetupError(Exception):
    """The environment could not be made; the message says what to do."""


class Environment:
    """The virtual environment of the checkout at `root`.

    `.stamp` in it holds the extras installed and a hash of all that it was made from;
    `.unfinished` is there while it is being filled, so that one left by a killed set-up is not
    trusted but made anew.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self._stamp = self.folder / ".stamp"
        self._unfinished = self.folder / ".unfinished"

    def wanted(self) -> str:
        """A hash of what the environment depends on: the two files, its place and its Python."""
        digest = hashlib.sha256()
        for name in ("pyproject.toml", "constraints.txt"):
            content = (self.root / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
        digest.update(f"{self.folder} {sys.version_info[:2]}".encode())
        return digest.hexdigest()

    def is_current(self, extras: Sequence[str]) -> bool:
        """Whether what is installed is up to date and has all of `extras`."""
        if self._unfinished.exists() or not self.python.exists():
            return False
        made_from, installed = self._installed()
        return made_from == self.wanted() and installed >= set(extras)

    def install(self, extras: Sequence[str]) -> None:
        """Bring the environment up to date, from the start where need be. Raises SetupError.

        Extras that it has already are kept up to date too.
        """
        if Path(sys.prefix).resolve() != self.folder.resolve() or self._unfinished.exists():
            self._create()
        extras = sorted({*extras, *self._installed()[1]})
        self._unfinished.touch()
        self._stamp.unlink(missing_ok=True)
        wanted = requirements(self.root / "pyproject.toml", extras)
        names = ", ".join(re.split(r"[<>=!~;@\[ ]", line)[0] for line in wanted)
        _say(f"Installing what is missing of: {names}. The first time takes minutes …")
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        pinned = ["-c", str(self.root / "constraints.txt")]
        if _run([*pip, *pinned, *wanted]) != 0:
            raise SetupError(
                "pip could not install the requirements; its own message is above. Check the "
                "network and pip's index settings, then run the same command again."
            )
        self._stamp.write_text(f"{self.wanted()} {' '.join(extras)}")
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

    def _installed(self) -> tuple[str, set[str]]:
        """The hash and the extras of the last set-up that ended well."""
        if not self._stamp.is_file():
            return "", set()
        made_from, *extras = self._stamp.read_text().split() or [""]
        return made_from, set(extras)


def requirements(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """The project's dependencies and those of `extras`, without references to itself."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = [*project["dependencies"]]
    for extra in extras:
        found = project.get("optional-dependencies", {}).get(extra, [])
        lines += [line for line in found if not line.startswith(f"{project['name']}[")]
    return lines


def _run(pip: list[str]) -> int:
    """Run pip and return its status; say what it downloads and installs, and that it is alive."""
    process = subprocess.Popen([*pip, "--progress-bar", "off"], stdout=subprocess.PIPE, text=True)
    started = heard = time.monotonic()
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(1):
            nonlocal heard
            if time.monotonic() - heard >= _HEARTBEAT_S:
                heard = time.monotonic()
                _say(f"  … pip is still at work ({heard - started:.0f} s)")

    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := _NEWS.search(line):
                heard = time.monotonic()
                _say("  " + " ".join(part for part in found.groups() if part))
        return process.wait()
    finally:
        ended.set()
        heart.join()
        process.terminate()  # where we were interrupted; one that has ended is left alone
        process.wait()


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


def main(root: Path, argv: Sequence[str]) -> int:
    if unknown := [flag for flag in argv if flag != "--dev"]:
        _say(f"error: {unknown[0]}: only --dev is taken, for what tests and checks need")
        return 2
    extras = DEV if argv else USE
    environment = Environment(root)
    try:
        with _locked(root):
            if not environment.is_current(extras):
                environment.install(extras)
    except (SetupError, OSError, subprocess.CalledProcessError) as e:
        _say(f"error: {e}")
        return 1
    except KeyboardInterrupt:
        _say("Set-up was interrupted; the next run starts it again.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent, sys.argv[1:]))
