"""What is checked before the base is loaded, so that a slip in a flag is answered at once."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
import time
from pathlib import Path

from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError

from api.settings import Settings
from registry.connection import connect, shown

#: Seconds in which a Redis server must answer that was started together with this one.
REDIS_WAIT_S = 3


class StartError(Exception):
    """The server cannot start; the message says why and what to change."""


def check_places(settings: Settings) -> None:
    """Refuse folders and a Redis server that cannot be used. Raises StartError."""
    seeds = settings.seed_adapters
    if seeds is not None and not seeds.is_dir():
        raise StartError(f"--seed-adapters: there is no folder {seeds}")
    try:
        settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.data):
            pass
        if settings.redis is None and _is_owned(settings.data / "registry"):
            raise StartError(f"--data: the folder {settings.data} is in use by another server")
    except OSError as e:
        raise StartError(
            f"--data: the folder {settings.data} cannot be written: {e.strerror or e}"
        ) from e
    if settings.redis is not None:
        asyncio.run(_ping(settings.redis))


def check_device(device: str) -> None:
    """Refuse a device that this machine lacks. Raises StartError."""
    if device == "cpu":
        return
    import torch  # takes seconds

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        built = torch.version.cuda or torch.version.hip
        why = "finds no GPU" if built else "was built without CUDA"
        raise StartError(f"--device: there is no {device}, torch {why}; cpu is there")
    if int(device.partition(":")[2] or 0) >= count:
        present = ", ".join(f"cuda:{i}" for i in range(count))
        raise StartError(f"--device: there is no {device}; cpu and {present} are there")


def check_model(settings: Settings) -> None:
    """Refuse a path that is no model's folder before it is taken for the name of a remote one."""
    path = Path(settings.model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StartError(f"--model: {path} has no config.json; it is no model's folder")
    elif path.exists() or settings.model.startswith((".", "/", "~")):
        raise StartError(f"--model: there is no folder {path}")


def check_memory(settings: Settings) -> None:
    """Refuse budgets that together exceed the machine's memory. Raises StartError."""
    weights = sum(file.stat().st_size for file in Path(settings.model).glob("*.safetensors"))
    parts: dict[str, int] = {"host adapters": settings.host_adapter_memory}
    if settings.device == "cpu":
        parts |= {"weights": weights, "KV": settings.kv_memory, "adapters": settings.adapter_memory}
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sum(parts.values()) > total:
        needs = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in parts.items())
        raise StartError(
            f"not enough memory: the machine has {total / 2**20:.0f} MiB, and this needs more, in "
            f"MiB: {needs}. Lower --kv-memory, --adapter-memory or --host-adapter-memory"
        )


async def _ping(url: str) -> None:
    """Raises StartError if Redis does not answer, even after a while: it may be starting too."""
    until = time.monotonic() + REDIS_WAIT_S
    while True:
        try:
            async with connect(url) as redis:
                await redis.ping()
            return
        except BusyLoadingError:
            return
        except (RedisError, OSError) as e:
            if time.monotonic() >= until or isinstance(e, AuthenticationError):
                raise StartError(f"--redis: {shown(url)} does not answer: {e}") from e
        await asyncio.sleep(0.2)


def _is_owned(registry: Path) -> bool:
    """Whether a server holds the folder of the embedded record store, by its lock."""
    try:
        descriptor = os.open(registry / "owner.lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
