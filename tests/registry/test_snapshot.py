"""The snapshot: complete, in order, and back in step after whatever happens to the server."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from registry import keys, snapshot
from registry.errors import NotFound, RegistryUnavailable
from registry.store import RegistryStore
from tests.registry.servers import manifest, run, running, server, store, until


def test_changes_of_another_process_arrive_without_polling(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (_, url), store(url) as writer, store(url) as reader:
            await writer.add_version("t", "b", manifest(1), request_id="r1")
            await writer.add_version("t", "a", manifest(2), request_id="r2")
            await writer.add_version("t", "b", manifest(3), request_id="r3")
            await until(lambda: reader.snapshot.revision == 3, seconds=snapshot.POLL_S / 2)
            assert [adapter.name for adapter in reader.snapshot.list("t")] == ["a", "b"]
            assert reader.snapshot.list("t") == writer.snapshot.list("t")
            await writer.delete_adapter("t", "b", request_id="r4")
            await until(lambda: reader.snapshot.revision == 4, seconds=snapshot.POLL_S / 2)
            with pytest.raises(NotFound):
                reader.snapshot.get("t", "b")

    run(test)


def test_nothing_is_missed_over_kills_of_the_server(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (owner, url), store(url) as writer, store(url) as reader:
            for round_ in range(3):
                for i in range(10):
                    await _insist(writer, f"a{i}", round_ * 10 + i)
                assert owner.pid is not None
                os.kill(owner.pid, signal.SIGKILL)
            await _insist(writer, "last", 999)
            await until(lambda: reader.snapshot.find("t", "last") is not None)
            assert reader.snapshot.list("t") == writer.snapshot.list("t")
            assert all(len(a.versions) == 3 for a in reader.snapshot.list("t") if a.name != "last")

    run(test)


def test_a_reader_too_far_behind_for_the_stream_loads_everything(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (_, url), store(url) as writer, store(url) as reader:
            await writer.add_version("t", "a", manifest(1), request_id="r1")
            await until(lambda: reader.snapshot.revision == 1)
            await reader.snapshot.close()
            for seed in range(2, 6):
                await writer.add_version("t", f"a{seed}", manifest(seed), request_id=f"r{seed}")
            async with _client(url) as redis:
                await redis.xtrim(keys.CHANGES, maxlen=1, approximate=False)
            epoch = reader.snapshot._epoch
            await reader.snapshot.catch_up(epoch, 5)
            assert reader.snapshot.list("t") == writer.snapshot.list("t")

    run(test)


@pytest.mark.parametrize("written_after", [0, 1, 5])
def test_an_emptied_registry_is_noticed_even_when_it_has_been_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_after: int
) -> None:
    monkeypatch.setattr(snapshot, "POLL_S", 0.2)

    async def test() -> None:
        async with server(tmp_path) as (_, url), store(url) as writer, store(url) as reader:
            for seed in range(3):
                await writer.add_version("t", f"old{seed}", manifest(seed), request_id=f"r{seed}")
            await until(lambda: reader.snapshot.revision == 3)
            async with _client(url) as redis:
                await redis.flushall()
            for seed in range(written_after):
                await writer.add_version("t", f"new{seed}", manifest(seed), request_id=f"r{seed}")
            names = {f"new{seed}" for seed in range(written_after)}
            await until(lambda: {a.name for a in reader.snapshot.list("t")} == names)
            # What to keep on the disk cannot be told from an emptied registry.
            with pytest.raises(RegistryUnavailable, match="emptied"):
                reader.snapshot.digests()

    run(test)


def test_an_older_state_put_back_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "POLL_S", 0.2)

    async def test() -> None:
        async with server(tmp_path) as (_, url), store(url) as opened, _client(url) as redis:
            await opened.add_version("t", "a", manifest(1), request_id="r1")
            saved = {name: await redis.dump(name) for name in await redis.keys()}
            await opened.add_version("t", "b", manifest(2), request_id="r2")
            for name, value in saved.items():
                assert value is not None
                await redis.restore(name, 0, value, replace=True)
            await until(lambda: [a.name for a in opened.snapshot.list("t")] == ["a"])
            assert opened.snapshot.revision == 1
            await opened.add_version("t", "c", manifest(3), request_id="r3")
            assert [a.name for a in opened.snapshot.list("t")] == ["a", "c"]

    run(test)


def test_age_grows_without_redis_and_falls_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "STALE_S", 1.5)

    async def test() -> None:
        async with server(tmp_path) as (owner, url), store(url) as opened:
            await opened.add_version("t", "a", manifest(1), request_id="r1")
            assert not opened.snapshot.stale
            assert owner.pid is not None
            os.kill(owner.pid, signal.SIGSTOP)
            try:
                await until(lambda: opened.snapshot.stale)
                assert opened.snapshot.get("t", "a")
                with pytest.raises(RegistryUnavailable, match="last heard of"):
                    opened.snapshot.digests()
            finally:
                os.kill(owner.pid, signal.SIGCONT)
            await until(lambda: not opened.snapshot.stale)
            assert opened.snapshot.digests() == {manifest(1).digest}

    run(test)


def test_one_damaged_record_hides_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with server(tmp_path) as (_, url), store(url) as writer, _client(url) as redis:
            await writer.add_version("t", "good", manifest(1), request_id="r1")
            await writer.add_version("t", "bad", manifest(2), request_id="r2")
            await redis.hset(keys.VERSIONS, "t/bad/1", b"rubbish")
            async with store(url) as fresh:
                assert [a.name for a in fresh.snapshot.list("t")] == ["good"]
                with pytest.raises(RegistryUnavailable, match="cannot be read"):
                    fresh.snapshot.digests()  # its blob may not be swept
        assert "'bad'" in caplog.text

    run(test)


def test_hundreds_of_adapters_load_in_order_without_holding_up_the_loop(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path / "source") as source:
            await source.add_version("t", "a", manifest(0, modules=210), request_id="r0")
            adapter = source.snapshot.get("t", "a")
        async with server(tmp_path / "data") as (_, url), store(url) as opened:
            many = [
                type(adapter)("t", f"a{i:04}", adapter.created, adapter.versions)
                for i in range(200)
            ]
            assert await opened.restore(many)
            gaps = []

            async def beat() -> None:
                while True:
                    before = time.monotonic()
                    await asyncio.sleep(0.001)
                    gaps.append(time.monotonic() - before)

            heart = asyncio.create_task(beat())
            async with store(url) as fresh:
                assert fresh.snapshot.list("t") == many
            heart.cancel()
            assert max(gaps) < 1.0  # generous, for a machine under load
            lists = {id(a.latest.manifest.modules) for a in fresh.snapshot.list("t")}
            assert len(lists) == 1  # shared: thousands of equal manifests cost little

    run(test)


async def _insist(writer: RegistryStore, name: str, seed: int) -> None:
    """Add a version as a client would: again with the same request id until it is done."""
    for _ in range(200):
        try:
            await writer.add_version("t", name, manifest(seed), request_id=f"r{seed}")
            return
        except RegistryUnavailable:
            await asyncio.sleep(0.02)
    raise AssertionError("the server did not come back")


def _client(url: str) -> Redis:
    client: Redis = Redis.from_url(url)
    return client
