"""Start the server: settings, the demo base where none is named, then HTTP until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from api.services import DEFAULT_TENANT
from api.settings import Settings, unknown_variables
from base_engine.errors import EngineError
from registry.errors import RegistryError
from registry.routing import served
from scripts.demo_model import DemoModelError, ensure_demo_model
from scripts.start_checks import (
    StartError,
    check_device,
    check_memory,
    check_model,
    check_places,
)

#: Seconds that an idle connection stays open: longer than clients (httpx 5, proxies 60) keep
#: theirs, or they would send a request just as it is closed and see it fail.
KEEP_ALIVE_S = 75

#: Seconds that running answers get to finish after the first signal.
GRACE_S = 10

#: Seconds after that until connections are cut whose clients do not read the end of their answer.
_CUT_S = 5

DEMO_ADAPTERS = Path(__file__).resolve().parent / "demo"

_log = logging.getLogger("lorikeet")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns 0 after a clean stop, 1 if it could not start."""
    settings = Settings.from_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in ("uvicorn.error", "httpx"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # The hub's client logs every retry twice, before one error that says the same.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    for warning in unknown_variables(os.environ):
        _say(f"warning: {warning}")
    try:
        check_places(settings)
        check_device(settings.device)
        listener = bind(settings.host, settings.port)
        settings = with_demo(settings)
        check_model(settings)
        check_memory(settings)
        return _serve(settings, listener)
    except (StartError, DemoModelError) as e:
        _say(f"error: {e}")
        return 1
    except KeyboardInterrupt:
        return 130


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises StartError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as e:
        raise StartError(_bind_failure(e, host, port)) from e
    return listener


def with_demo(settings: Settings) -> Settings:
    """Settings with the demo base's folder and the demo adapters, if no other base is named."""
    default = Settings()
    if settings.model != default.model:
        return settings
    return replace(
        settings,
        model=str(ensure_demo_model(_say)),
        model_name=settings.public_name,
        seed_adapters=settings.seed_adapters or DEMO_ADAPTERS,
    )


def _serve(settings: Settings, listener: socket.socket) -> int:
    _say(f"Loading {settings.public_name} …")
    from api.app import create_app  # takes seconds, so not for --help

    app = create_app(settings)
    startup = _Startup(app)
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S + _CUT_S,
    )
    # uvicorn raises the signal again when it has stopped: by then there is nothing left to do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return asyncio.run(_run(_Server(config, startup), startup, listener, settings.model))


async def _run(server: _Server, startup: _Startup, listener: socket.socket, model: str) -> int:
    try:
        await server.serve(sockets=[listener])
    except SystemExit:
        if isinstance(startup.failure, asyncio.CancelledError):
            _say("Stopped before it was ready.")
            os._exit(130)  # a thread may still be loading the base; nobody waits for it
        raise StartError(_start_failure(startup.failure, model)) from startup.failure
    except OSError as e:
        raise StartError(_bind_failure(e, *listener.getsockname()[:2])) from e
    return 0


class _Startup:
    """The application's lifespan, watched: its state, what it failed with, and a way to cut it."""

    def __init__(self, app: Starlette) -> None:
        self.failure: BaseException | None = None
        self.state: Mapping[str, Any] = {}
        self._inner = app.router.lifespan_context
        self._task: asyncio.Task[Any] | None = None
        app.router.lifespan_context = self._lifespan

    def cancel(self) -> None:
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[Mapping[str, Any]]:
        self._task = asyncio.current_task()
        try:
            async with self._inner(app) as state:
                self.state = state or {}
                yield self.state
        except BaseException as e:
            self.failure = e
            raise


class _Server(uvicorn.Server):
    """uvicorn's server, with words for the user, and stoppable while it starts."""

    def __init__(self, config: uvicorn.Config, startup: _Startup) -> None:
        super().__init__(config)
        self._startup = startup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError:
            await self.lifespan.shutdown()
            raise
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        # What the libraries have made stays. A full collection over it would hold up every stream
        # for a third of a second, again and again.
        gc.collect()
        gc.freeze()
        services = self._startup.state["services"]
        base = services.engine.base
        adapters = [a.name for a in served(services.store.snapshot, DEFAULT_TENANT, base)]
        address = _address(self.servers[0].sockets[0])
        print(_welcome(address, base.name, adapters), flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:
            self._startup.cancel()
        elif not self.should_exit:
            _say(f"Stopping; running answers get {GRACE_S} s (Ctrl-C again: stop at once) …")
        super().handle_exit(sig, frame)

    async def _end_answers(self) -> None:
        """After the grace period, end what still runs with an error that its client can read."""
        await asyncio.sleep(GRACE_S)
        await asyncio.to_thread(self._startup.state["services"].engine.stop)


def _bind_failure(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another with --port (0 takes a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one above 1023"
    return f"cannot listen on {host}, port {port}: {error.strerror or error}"


def _start_failure(error: BaseException | None, model: str) -> str:
    text = str(error).strip() or type(error).__name__
    if isinstance(error, MemoryError) or "not enough memory" in text or "out of memory" in text:
        return (
            f"not enough memory: {text.splitlines()[0]}. Lower --kv-memory or --adapter-memory, "
            "or serve a smaller model"
        )
    # What comes from the system has a number, what comes from the hub's client has none.
    if isinstance(error, OSError) and error.errno is None and not Path(model).is_dir():
        return (
            f"--model: {model} is no folder here, and cannot be had from the Hugging Face hub: "
            + text.splitlines()[0]
        )
    # Its traceback tells more than its text does, unless it was raised for the user to read.
    if not isinstance(error, (EngineError, RegistryError, OSError, ValueError)):
        _log.error("start failed", exc_info=error)
    return f"cannot start: {text}"


def _address(listener: socket.socket) -> str:
    """The URL to reach `listener` from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _welcome(address: str, base: str, adapters: Sequence[str]) -> str:
    model = "pirate" if "pirate" in adapters else (adapters[0] if adapters else base)
    question = {"role": "user", "content": "How do I learn to swim?"}
    body = json.dumps({"model": model, "messages": [question], "max_tokens": 60, "temperature": 0})
    names = ", ".join(adapters[:8]) + (" …" if len(adapters) > 8 else "")
    return f"""
Lorikeet serves {base} at {address}, with adapters: {names or "none yet"}

Ask one:
  curl {address}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{body}'
See which adapters shared the last forward passes (ask several at once first):
  curl '{address}/v1/engine/steps?limit=60'
"""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # all is closed; taking torch's modules apart would only cost seconds
