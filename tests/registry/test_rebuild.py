"""The registry comes back from the blobs when Redis has lost everything."""

from __future__ import annotations

import asyncio
from pathlib import Path

from redis.asyncio import Redis

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from registry.blobs import BlobStore
from registry.rebuild import rebuild
from registry.store import RegistryStore
from tests.registry.servers import manifest, run, running, server, store


def test_a_lost_registry_is_rebuilt_with_its_numbers(tmp_path: Path) -> None:
    async def test() -> None:
        blobs = BlobStore(tmp_path / "blobs")
        async with server(tmp_path / "data") as (_, url), store(url) as opened:
            # Equal content is one blob with two records here.
            for name, seed in (("a", 1), ("a", 2), ("a", 1), ("b", 1), ("gone", 7)):
                await _publish(opened, blobs, name, seed)
            await opened.delete_adapter("t", "gone", request_id="d")
            blobs.remove_record(manifest(7).digest, "t", "gone", 1)
            before = opened.snapshot.list("t")
            async with _client(url) as redis:
                await redis.flushall()
        async with running(tmp_path / "data") as opened:
            assert opened.snapshot.list("t") == []
            assert await rebuild(opened, blobs) == 4
            assert opened.snapshot.list("t") == before
            assert [v.number for v in opened.snapshot.get("t", "a").versions] == [1, 2, 3]
            assert await rebuild(opened, blobs) == 0
            # Life goes on behind the numbers that were there.
            assert (await opened.add_version("t", "a", manifest(9), request_id="n")).number == 4
        async with running(tmp_path / "data") as opened:
            assert len(opened.snapshot.get("t", "a").versions) == 4

    run(test)


def test_a_missing_number_stays_missing(tmp_path: Path) -> None:
    async def test() -> None:
        blobs = BlobStore(tmp_path / "blobs")
        async with running(tmp_path / "one") as opened:
            for seed in (1, 2, 3):
                await _publish(opened, blobs, "a", seed)
        (blobs.open(manifest(2).digest) / WEIGHTS_FILE).unlink()
        async with server(tmp_path / "two") as (_, url), store(url) as opened:
            assert await rebuild(opened, blobs) == 2
            assert [v.number for v in opened.snapshot.get("t", "a").versions] == [1, 3]
            async with store(url) as fresh:
                assert fresh.snapshot.list("t") == opened.snapshot.list("t")

    run(test)


def test_a_registry_that_was_ever_written_is_left_as_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        blobs = BlobStore(tmp_path / "blobs")
        async with running(tmp_path / "data") as opened:
            await _publish(opened, blobs, "a", 1)
            await opened.delete_adapter("t", "a", request_id="d")
            assert await rebuild(opened, blobs) == 0
            assert opened.snapshot.list("t") == []

    run(test)


def test_an_upload_that_overtakes_the_cleaning_after_a_deletion_is_kept(tmp_path: Path) -> None:
    """Equal content under the same name: only the deleted version's own note goes."""

    async def test() -> None:
        blobs = BlobStore(tmp_path / "blobs")
        async with running(tmp_path / "one") as opened:
            await _publish(opened, blobs, "a", 1)
            deleted = await opened.delete_adapter("t", "a", request_id="d")
            await _publish(opened, blobs, "a", 1)
            for version in deleted:
                blobs.remove_record(version.digest, "t", "a", version.number)
            before = opened.snapshot.list("t")
        async with running(tmp_path / "two") as opened:
            assert await rebuild(opened, blobs) == 1
            assert opened.snapshot.list("t") == before

    run(test)


def test_two_processes_that_rebuild_at_once_do_it_once(tmp_path: Path) -> None:
    async def test() -> None:
        blobs = BlobStore(tmp_path / "blobs")
        async with running(tmp_path / "one") as opened:
            for seed in (1, 2):
                await _publish(opened, blobs, "a", seed)
        async with server(tmp_path / "two") as (_, url), store(url) as one, store(url) as two:
            assert sorted(await asyncio.gather(rebuild(one, blobs), rebuild(two, blobs))) == [0, 2]
            assert one.snapshot.list("t") == two.snapshot.list("t")
            assert one.snapshot.digests() == {manifest(1).digest, manifest(2).digest}

    run(test)


def test_a_damaged_record_is_left_out_and_the_others_come_back(tmp_path: Path) -> None:
    async def test() -> None:
        blobs = BlobStore(tmp_path / "blobs")
        async with running(tmp_path / "one") as opened:
            await _publish(opened, blobs, "a", 1)
            await _publish(opened, blobs, "b", 2)
        (blobs.open(manifest(1).digest) / "record.json").write_text('{"records": [{"ten')
        async with running(tmp_path / "two") as opened:
            assert await rebuild(opened, blobs) == 1
            assert [a.name for a in opened.snapshot.list("t")] == ["b"]

    run(test)


async def _publish(opened: RegistryStore, blobs: BlobStore, name: str, seed: int) -> None:
    digest = manifest(seed).digest
    with blobs.stage() as staging:
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            (staging.path / file).write_bytes(b"%d" % seed)
        blobs.commit(staging, digest)
    request_id = f"{name}{opened.snapshot.revision}"
    version = await opened.add_version("t", name, manifest(seed), request_id=request_id)
    blobs.write_record(digest, "t", name, version.to_json())


def _client(url: str) -> Redis:
    client: Redis = Redis.from_url(url)
    return client
