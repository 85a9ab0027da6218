"""Mutations: atomic, idempotent, durable, and visible at once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from registry import keys
from registry.errors import (
    Conflict,
    InvalidName,
    NotFound,
    RegistryUnavailable,
    StorageFull,
)
from registry.store import RegistryStore
from tests.registry.servers import Proxy, manifest, run, running, server, store, until


def test_versions_count_from_one_and_keep_their_manifest(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as opened:
            before = int(time.time())
            first = await opened.add_version("t", "a", manifest(1, modules=200), request_id="r1")
            second = await opened.add_version("t", "a", manifest(2), request_id="r2")
            assert (first.number, second.number) == (1, 2)
            assert first.manifest == manifest(1, modules=200)
            assert first.digest == manifest(1).digest
            assert before <= first.created <= time.time()
            adapter = opened.snapshot.get("t", "a")
            assert adapter.versions == (first, second)
            assert adapter.latest is adapter.versions[-1]
            assert adapter.created == first.created

    run(test)


def test_numbers_are_not_used_again_after_deletion_or_restart(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as opened:
            await opened.add_version("t", "a", manifest(1), request_id="r1")
            await opened.add_version("t", "a", manifest(2), request_id="r2")
            await opened.delete_adapter("t", "a", request_id="r3")
            with pytest.raises(NotFound):
                opened.snapshot.get("t", "a")
        async with running(tmp_path) as opened:
            assert opened.snapshot.list("t") == []
            again = await opened.add_version("t", "a", manifest(1), request_id="r4")
            assert again.number == 3
            assert opened.snapshot.get("t", "a").versions == (again,)
            await opened.delete_adapter("t", "a", request_id="r5")
            assert (await opened.add_version("t", "a", manifest(1), request_id="r6")).number == 4

    run(test)


def test_deletion_leaves_nothing_of_the_adapter_but_its_number(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (_, url), store(url) as opened, _client(url) as redis:
            for seed in range(3):
                await opened.add_version("t", "a", manifest(seed), request_id=f"r{seed}")
            await opened.add_version("t", "other", manifest(9), request_id="r9")
            deleted = await opened.delete_adapter("t", "a", request_id="d")
            assert [(v.number, v.digest) for v in deleted] == [
                (seed + 1, manifest(seed).digest) for seed in range(3)
            ]
            assert await opened.delete_adapter("t", "a", request_id="d") == []
            assert await redis.hkeys(keys.ADAPTERS) == [b"t/other"]
            assert await redis.hkeys(keys.VERSIONS) == [b"t/other/1"]

    run(test)


def test_the_same_request_id_does_its_work_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as opened:
            snapshot = opened.snapshot
            first = await opened.add_version("t", "a", manifest(1), request_id="r1")
            await opened.add_version("t", "a", manifest(2), request_id="r2")
            assert await opened.add_version("t", "a", manifest(1), request_id="r1") == first
            assert snapshot.revision == 2
            await opened.delete_adapter("t", "a", request_id="d")
            await opened.delete_adapter("t", "a", request_id="d")
            assert snapshot.revision == 3
            # Even now it is the answer to that request, and does not bring the adapter back.
            assert await opened.add_version("t", "a", manifest(1), request_id="r1") == first
            assert snapshot.list("t") == []
            # Another tenant's request ids are its own.
            assert (await opened.add_version("u", "a", manifest(5), request_id="r1")).number == 1

    run(test)


def test_a_request_id_for_something_else_is_a_conflict(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as opened:
            await opened.add_version("t", "a", manifest(1), request_id="r1")
            with pytest.raises(Conflict, match="r1"):
                await opened.add_version("t", "a", manifest(2), request_id="r1")
            with pytest.raises(Conflict):
                await opened.add_version("t", "b", manifest(1), request_id="r1")
            with pytest.raises(Conflict):
                await opened.delete_adapter("t", "a", request_id="r1")
            assert opened.snapshot.revision == 1

    run(test)


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lost_reply_is_reported_and_the_repetition_does_not_do_it_twice(
    tmp_path: Path, lost: int
) -> None:
    async def test() -> None:
        async with server(tmp_path / "data") as (_, url):
            async with Proxy(url, tmp_path / "p") as proxy, store(proxy.url) as opened:
                proxy.drop_replies = lost
                for _ in range(lost):
                    with pytest.raises(RegistryUnavailable):
                        await opened.add_version("t", "a", manifest(1), request_id="r1")
                assert proxy.dropped == lost
                made = await opened.add_version("t", "a", manifest(1), request_id="r1")
                assert made.number == 1
                assert opened.snapshot.revision == 1
                assert opened.snapshot.get("t", "a").versions == (made,)

    run(test)


def test_parallel_uploads_of_equal_content_all_succeed_as_one_version(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as opened:
            made = await asyncio.gather(
                *(opened.add_version("t", "a", manifest(1), request_id=f"r{i}") for i in range(10))
            )
            assert {version.number for version in made} == {1}
            assert opened.snapshot.get("t", "a").versions == (made[0],)
            # Content that is not the latest any more makes a version: this is how to go back.
            await opened.add_version("t", "a", manifest(2), request_id="s")
            assert (await opened.add_version("t", "a", manifest(1), request_id="u")).number == 3

    run(test)


def test_parallel_uploads_of_different_content_become_ordered_versions(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (_, url), store(url) as one, store(url) as two:
            made = await asyncio.gather(
                *(
                    (one, two)[i % 2].add_version("t", "a", manifest(i), request_id=f"r{i}")
                    for i in range(10)
                )
            )
            assert sorted(version.number for version in made) == list(range(1, 11))
            versions = one.snapshot.get("t", "a").versions
            assert [version.number for version in versions] == list(range(1, 11))
            assert {v.digest: v.number for v in made} == {v.digest: v.number for v in versions}

    run(test)


def test_exactly_one_of_ten_parallel_deletions_succeeds(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (_, url), store(url) as one, store(url) as two:
            await one.add_version("t", "a", manifest(1), request_id="r1")
            ends = await asyncio.gather(
                *(
                    (one, two)[i % 2].delete_adapter("t", "a", request_id=f"d{i}")
                    for i in range(10)
                ),
                return_exceptions=True,
            )
            assert sum(isinstance(end, list) and len(end) == 1 for end in ends) == 1
            assert sum(isinstance(end, NotFound) for end in ends) == 9

    run(test)


def test_parallel_uploads_and_deletions_end_in_one_consistent_state(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (_, url), store(url) as one, store(url) as two:

            async def act(i: int) -> Any:
                opened = (one, two)[i % 2]
                if i % 3 == 2:
                    return await opened.delete_adapter("t", "a", request_id=f"d{i}")
                return await opened.add_version("t", "a", manifest(i), request_id=f"r{i}")

            ends = await asyncio.gather(*(act(i) for i in range(30)), return_exceptions=True)
            bad = [e for e in ends if isinstance(e, Exception) and not isinstance(e, NotFound)]
            assert bad == []
            revision = max(one.snapshot.revision, two.snapshot.revision)
            await until(lambda: one.snapshot.revision == two.snapshot.revision == revision)
            assert one.snapshot.list("t") == two.snapshot.list("t")
            async with store(url) as fresh:
                assert fresh.snapshot.list("t") == one.snapshot.list("t")
                assert fresh.snapshot.revision == revision

    run(test)


def test_another_tenants_adapter_can_neither_be_seen_nor_deleted(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as opened:
            await opened.add_version("t", "a", manifest(1), request_id="r1")
            assert opened.snapshot.list("u") == []
            theirs = await _failure(opened.delete_adapter("u", "a", request_id="d"))
            nobodys = await _failure(opened.delete_adapter("u", "b", request_id="d"))
            assert str(theirs).replace("'a'", "'b'") == str(nobodys)
            assert opened.snapshot.get("t", "a").latest.number == 1

    run(test)


@pytest.mark.parametrize("name", ["", "a/b", "../x"])
def test_what_would_make_a_key_ambiguous_never_reaches_redis(tmp_path: Path, name: str) -> None:
    async def test() -> None:
        async with running(tmp_path) as opened:
            for tenant, adapter in ((name, "a"), ("t", name)):
                with pytest.raises(InvalidName):
                    await opened.add_version(tenant, adapter, manifest(1), request_id="r1")
            assert opened.snapshot.revision == 0

    run(test)


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "a\n", "ü"])
def test_a_malformed_request_id_is_refused(tmp_path: Path, request_id: str) -> None:
    async def test() -> None:
        async with running(tmp_path) as opened:
            with pytest.raises(InvalidName, match="request id"):
                await opened.add_version("t", "a", manifest(1), request_id=request_id)

    run(test)


def test_without_redis_mutations_fail_at_once_and_reads_go_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (owner, url), store(url) as opened:
            made = await opened.add_version("t", "a", manifest(1), request_id="r1")
            await owner.stop()
            started = time.monotonic()
            with pytest.raises(RegistryUnavailable):
                await opened.add_version("t", "a", manifest(2), request_id="r2")
            with pytest.raises(RegistryUnavailable):
                await opened.delete_adapter("t", "a", request_id="r3")
            assert time.monotonic() - started < 1
            assert opened.snapshot.get("t", "a").latest == made

    run(test)


def test_a_server_that_hangs_fails_mutations_within_the_bound(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (owner, url), store(url) as opened:
            await opened.add_version("t", "a", manifest(1), request_id="r1")
            assert owner.pid is not None
            os.kill(owner.pid, signal.SIGSTOP)
            try:
                started = time.monotonic()
                with pytest.raises(RegistryUnavailable):
                    await opened.add_version("t", "a", manifest(2), request_id="r2")
                assert time.monotonic() - started < 4
                assert opened.snapshot.get("t", "a").latest.number == 1
            finally:
                os.kill(owner.pid, signal.SIGCONT)
            assert (await opened.add_version("t", "a", manifest(2), request_id="r2")).number == 2
            assert len(opened.snapshot.get("t", "a").versions) == 2

    run(test)


def test_open_gives_up_with_a_message_that_holds_no_password(tmp_path: Path) -> None:
    async def test() -> None:
        url = "redis://user:hush@127.0.0.1:1/0"  # nobody listens on port 1
        with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:1") as caught:
            await RegistryStore.open(url, wait_s=0.2)
        assert "hush" not in str(caught.value)
        with pytest.raises(ValueError, match="scheme"):
            await RegistryStore.open("http://localhost", wait_s=0.2)

    run(test)


def test_a_server_that_keeps_no_file_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with server(tmp_path) as (_, url), store(url) as opened, _client(url) as redis:
            await redis.config_set("appendonly", "no")
            with caplog.at_level(logging.WARNING, logger="registry"):
                for seed in range(3):
                    await opened.add_version("t", "a", manifest(seed), request_id=f"r{seed}")
            assert len([r for r in caplog.records if "on disk" in r.message]) == 1

    run(test)


def test_a_full_server_is_storage_full_and_writes_work_again_afterwards(tmp_path: Path) -> None:
    async def test() -> None:
        async with server(tmp_path) as (_, url), store(url) as opened, _client(url) as redis:
            await redis.config_set("maxmemory", "1")
            with pytest.raises(StorageFull):
                await opened.add_version("t", "a", manifest(1), request_id="r1")
            assert opened.snapshot.revision == 0
            await redis.config_set("maxmemory", "0")
            assert (await opened.add_version("t", "a", manifest(1), request_id="r1")).number == 1

    run(test)


def _client(url: str) -> Redis:
    client: Redis = Redis.from_url(url)
    return client


async def _failure(awaitable: Any) -> NotFound:
    with pytest.raises(NotFound) as caught:
        await awaitable
    return caught.value
