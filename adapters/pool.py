"""The adapters on the device: who is there, who is on the way, whose pages may be reused."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock, Timer
from typing import Literal

import torch
from torch import Tensor

from adapters.errors import AdapterUnavailable
from adapters.host_cache import HostCache, HostCopy
from adapters.layout import layout_of
from adapters.manifest import AdapterRef, BaseSpec
from adapters.pages import ResidentAdapter
from adapters.slots import Slot, Slots
from adapters.terms import BaseParameters, mapped
from adapters.weights import AdapterWeights, load_weights

#: How long a failed load is remembered, in seconds.
FAILURE_SECONDS = 5.0

#: How long a loaded adapter is kept for whoever asked for it, in seconds: far longer than one pass
#: over the waiting queue takes.
RESERVED_SECONDS = 0.25

State = Literal["absent", "loading", "waiting", "resident"]


@dataclass(frozen=True)
class PoolStats:
    """A snapshot. Sizes in bytes; `resident`, `pinned` and `loading` count adapters.

    `loads_total` counts reads from disk, `copies_total` loads onto the device.
    """

    device_bytes: int
    device_used: int
    host_bytes: int
    host_used: int
    resident: int
    pinned: int
    loading: int
    loads_total: int
    copies_total: int
    evictions_total: int
    failures_total: int


class AdapterPool:
    """Adapters on the device, in ranges of one flat buffer, with a host cache behind them.

    In each step the step thread asks with `acquire`, in the order of its queue, for the adapters of
    every request that waits for some; the answer is all of them, pinned, or None, never a wait. An
    ask that finds room takes the pages of all that are missing at once, evicting idle adapters if
    that makes enough room; loader threads then read what the host cache lacks and copy it. An ask
    that finds no room starts nothing, so that adapters which must wait anyway do not churn disk and
    host cache. One lock guards the bookkeeping; it is never held during a read or a copy.

    A loaded adapter is *reserved* until it is first acquired, withdrawn, or left unclaimed for
    RESERVED_SECONDS. Reserved, pinned and loading adapters are never evicted. So H, the first in
    the queue, gets in even though others may pass it:

    - What H has taken it finds at its next ask. No eviction touches a load in progress, and a
      reservation outlasts the rest of the pass it began in; the next pass asks for H first. So
      waiting adapters cannot evict each other in turn.
    - If H asks for several, each ask that finds them all on the device or on their way renews
      their reservations: those that are ready stay until the last one is. An ask that lacks the
      room for one renews and takes nothing, so two requests never hold what the other lacks.
      Whoever holds reservations thus waits for loads only, which end by themselves.
    - H finds room in the end. The scheduler lets a bounded number of requests pass H; from then on
      only H asks. Pins end with their requests, loads end, reservations lapse (`on_change` tells),
      H's own among them as it renews none; so every page becomes free or idle. What H asks for
      then fits, if need be after its own idle adapters have made way to be placed anew: what
      exceeds the empty buffer is refused.
    """

    def __init__(
        self,
        base: BaseSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        device_bytes: int,
        host_bytes: int,
        loader_threads: int,
        on_change: Callable[[], None],
        parameters: BaseParameters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change` is called from other threads when an `acquire` may have a new answer, and
        `parameters` when an adapter is read that is relative to some of the base's.

        `clock` is in seconds. Raises ValueError for sizes that cannot work.
        """
        if device_bytes < dtype.itemsize:
            raise ValueError(f"device_bytes must hold at least one {dtype}, not {device_bytes}")
        if host_bytes < 0:
            raise ValueError(f"host_bytes must not be negative, not {host_bytes}")
        if loader_threads < 1:
            raise ValueError(f"loader_threads must be at least 1, not {loader_threads}")
        self.buffer = torch.zeros(device_bytes // dtype.itemsize, dtype=dtype, device=device)
        self._base = base
        self._parameters = parameters
        self._on_change = on_change
        self._clock = clock
        self._lock = Lock()
        # Two executors, so that what a step waits for never queues behind prefetches.
        self._loaders = ThreadPoolExecutor(loader_threads, "adapter-load")
        self._prefetchers = ThreadPoolExecutor(loader_threads, "adapter-prefetch")
        self._host = HostCache(host_bytes)
        self._slots = Slots(self.buffer.numel())
        self._failures: dict[str, tuple[str, float]] = {}  # message, remembered until
        # Digest -> asks it is part of that found no room -> `_slots.changes` then.
        self._no_room: dict[str, dict[tuple[str, ...], int]] = {}
        self._lapse: Timer | None = None
        self._closed = False
        self._prefetching = self._loads = self._copies = self._failed = 0

    def prefetch(self, ref: AdapterRef) -> None:
        """Begin reading `ref` into the host cache, unless it is there or on its way, failed just
        now, or the reads under way take half the cache. Never blocks; any thread."""
        try:
            nbytes = layout_of(ref, self._base).elements * self.buffer.itemsize
        except AdapterUnavailable:
            return  # acquire() tells the reason
        with self._lock:
            known = self._slots.get(ref.digest) or self._host.get(ref.digest)
            if known or self._closed or self._recent_failure(ref.digest):
                return
            if self._host.has_room(nbytes):
                self._prefetching += 1
                copy = self._host.reserve(ref.digest, nbytes)
                self._prefetchers.submit(self._prefetch, ref, copy)

    def acquire(self, refs: Sequence[AdapterRef]) -> tuple[ResidentAdapter, ...] | None:
        """Pin and return all of `refs` if they are on the device; else start what can be started,
        and None. Where room was lacking, `state` is "waiting" for one of them then.

        Step thread only; each adapter returned needs one `release`. Raises AdapterUnavailable when
        loading one failed within the last FAILURE_SECONDS, or when one or all together can never
        be loaded; ValueError when one is named twice.
        """
        if len(refs) > 1 and len({ref.digest for ref in refs}) < len(refs):
            raise ValueError(f"an adapter is asked for twice: {[ref.name for ref in refs]}")
        with self._lock:
            slots = [slot for ref in refs if (slot := self._slots.get(ref.digest))]
            if len(slots) == len(refs):
                return self._pinned(slots)
            if self._must_wait(refs):
                return None
            key = tuple([ref.digest for ref in refs])
            if self._no_room.get(key[0], {}).get(key) == self._slots.changes:
                return None
            taken = self._take(refs)
            if taken is None:
                for digest in key:
                    self._no_room.setdefault(digest, {})[key] = self._slots.changes
                self._wake_at_next_lapse()
                return None
            for ref in refs:
                self._found_room(ref.digest, key)
                if ref.digest in taken:
                    self._loaders.submit(self._load, ref, taken[ref.digest])
            # Not `slots`: some of those may have made way and be among the taken.
            self._reserve([slot for digest in key if (slot := self._slots.get(digest))])
            return None

    def release(self, resident: ResidentAdapter) -> None:
        """End one pin. Raises ValueError when `resident` is not pinned."""
        with self._lock:
            self._slots.unpin(resident)

    def withdraw(self, digest: str) -> None:
        """Nobody waits for `digest` any more: its reservation ends. Harmless if somebody does."""
        with self._lock:
            self._no_room.pop(digest, None)
            slot = self._slots.get(digest)
            if slot is not None:
                slot.wanted = False
                slot.reserved_until = 0.0
                self._slots.changes += 1

    def forget(self, digest: str) -> None:
        """Drop `digest` from host and device, and the memory of its failure. Any thread.

        Pinned handles stay valid until released; a load under way is discarded when it ends; a
        later `acquire` reads the files afresh.
        """
        with self._lock:
            self._failures.pop(digest, None)
            self._no_room.pop(digest, None)
            self._host.forget(digest)
            self._slots.forget(digest)

    def state(self, digest: str) -> State:
        """ "loading": on its way; "waiting": on the host only, or the last ask found no room."""
        with self._lock:
            slot = self._slots.get(digest)
            if slot is not None:
                return "resident" if slot.ready else "loading"
            copy = self._host.get(digest)
            if copy is not None and copy.weights is None:
                return "loading"
            return "waiting" if copy is not None or digest in self._no_room else "absent"

    def stats(self) -> PoolStats:
        with self._lock:
            return PoolStats(
                device_bytes=self.buffer.nbytes,
                device_used=self._slots.used * self.buffer.itemsize,
                host_bytes=self._host.budget,
                host_used=self._host.used,
                resident=sum(slot.ready for slot in self._slots),
                pinned=sum(slot.pins > 0 for slot in self._slots),
                loading=sum(not slot.ready for slot in self._slots) + self._prefetching,
                loads_total=self._loads,
                copies_total=self._copies,
                evictions_total=self._slots.evictions,
                failures_total=self._failed,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not add up."""
        with self._lock:
            self._slots.check_integrity()
            self._host.check_integrity()

    def close(self) -> None:
        """Wait for the reads and copies under way, start no more. Idempotent."""
        with self._lock:
            self._closed = True
            if self._lapse is not None:
                self._lapse.cancel()
        for executor in (self._prefetchers, self._loaders):
            executor.shutdown(cancel_futures=True)

    def _pinned(self, slots: list[Slot]) -> tuple[ResidentAdapter, ...] | None:
        for slot in slots:
            if not slot.ready:
                self._reserve(slots)
                return None
        for slot in slots:
            self._slots.pin(slot)
        return tuple([slot.adapter for slot in slots])

    def _reserve(self, slots: list[Slot]) -> None:
        """Keep those of one ask that are ready until those that are loading are ready too."""
        until = self._clock() + RESERVED_SECONDS
        for slot in slots:
            slot.wanted = True
            if slot.ready:
                slot.reserved_until = until

    def _must_wait(self, refs: Sequence[AdapterRef]) -> bool:
        """Whether one that has no slot is being read ahead. Raises what stands in the way."""
        reading = False
        for ref in refs:
            if self._slots.get(ref.digest) is None:
                if failure := self._recent_failure(ref.digest):
                    raise AdapterUnavailable(failure)
                if self._closed:
                    raise AdapterUnavailable(f"adapter {ref.name!r}: the adapter pool is closed")
                copy = self._host.get(ref.digest)
                reading |= copy is not None and copy.weights is None
        return reading

    def _take(self, refs: Sequence[AdapterRef]) -> dict[str, Slot] | None:
        layouts = {ref.digest: layout_of(ref, self._base) for ref in refs}
        need = [layouts[ref.digest].elements * self.buffer.itemsize for ref in refs]
        if sum(need) > self.buffer.nbytes:
            sizes = " and ".join(
                f"adapter {ref.name!r} takes {nbytes} bytes"
                for ref, nbytes in zip(refs, need, strict=True)
            )
            raise AdapterUnavailable(
                f"{sizes} on the device, where all adapters together have {self.buffer.nbytes}"
            )
        return self._slots.take(layouts, self._clock())

    def _found_room(self, digest: str, key: tuple[str, ...]) -> None:
        asks = self._no_room.get(digest)
        if asks is not None:
            asks.pop(key, None)
            if not asks:
                del self._no_room[digest]

    def _recent_failure(self, digest: str) -> str | None:
        message, until = self._failures.get(digest, ("", 0.0))
        if self._clock() < until:
            return message
        self._failures.pop(digest, None)
        return None

    def _remember_failure(self, digest: str, message: str) -> None:
        self._failures[digest] = message, self._clock() + FAILURE_SECONDS
        self._failed += 1

    def _wake_at_next_lapse(self) -> None:
        now = self._clock()
        ends = [slot.reserved_until for slot in self._slots if slot.reserved_until > now]
        if ends and self._lapse is None:
            self._lapse = Timer(min(ends) - now, self._lapsed)
            self._lapse.daemon = True
            self._lapse.start()

    def _lapsed(self) -> None:
        with self._lock:
            self._lapse = None
            self._slots.changes += 1
        self._on_change()

    def _prefetch(self, ref: AdapterRef, copy: HostCopy) -> None:
        failure = None
        try:
            copy.weights = self._read(ref)
        except Exception as error:
            failure = _message(ref, error)
        with self._lock:
            self._prefetching -= 1
            if failure and not copy.forgotten:
                self._remember_failure(ref.digest, failure)
            self._host.release(copy)
        self._on_change()

    def _load(self, ref: AdapterRef, slot: Slot) -> None:
        copy = failure = None
        adapter = slot.adapter
        try:
            with self._lock:
                if not slot.forgotten:
                    nbytes = slot.elements * self.buffer.itemsize
                    copy = self._host.hold(ref.digest) or self._host.reserve(ref.digest, nbytes)
            if copy is not None:
                if copy.weights is None:
                    copy.weights = self._read(ref)
                adapter = self._placed(ref, copy.weights, slot)
        except Exception as error:
            failure = _message(ref, error)
        with self._lock:
            if copy is not None:
                self._host.release(copy)
            if failure and not slot.forgotten:
                self._remember_failure(ref.digest, failure)
            if failure or slot.forgotten:
                self._slots.drop(slot)
            else:
                slot.adapter = adapter
                slot.ready = True
                slot.reserved_until = self._clock() + RESERVED_SECONDS if slot.wanted else 0.0
                self._slots.changes += 1
                self._copies += 1
        self._on_change()

    def _read(self, ref: AdapterRef) -> AdapterWeights:
        with self._lock:
            self._loads += 1
        return load_weights(ref, self._base, self.buffer.dtype, self._parameters)

    def _placed(self, ref: AdapterRef, weights: AdapterWeights, slot: Slot) -> ResidentAdapter:
        """Overwrite every page as a whole, so that nothing of its former user remains."""
        offsets = iter(slot.offsets)

        def place(tensor: Tensor) -> Tensor:
            offset = next(offsets)
            view = self.buffer[offset : offset + tensor.numel()].view(tensor.shape)
            return view.copy_(tensor)

        for target in weights.targets.values():
            for page in target.pages:
                place(page)
        terms = {
            module: tuple(mapped(term, place) for term in of_module)
            for module, of_module in weights.terms.items()
        }
        assert next(offsets, None) is None, f"{ref.name} has fewer tensors than its layout"
        return replace(slot.adapter, terms=terms, vocab_size=ref.manifest.vocab_size)


def _message(ref: AdapterRef, error: Exception) -> str:
    if isinstance(error, AdapterUnavailable):
        return str(error)
    return f"adapter {ref.name!r}: loading failed: {type(error).__name__}: {error}"
