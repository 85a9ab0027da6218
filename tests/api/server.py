"""A whole server for a test: real HTTP on a free port, real engine, real record store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from openai import OpenAI
from starlette.applications import Starlette

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from api.app import create_app
from api.settings import ByteSize, Settings
from base_engine.engine import Engine

SMALL: dict[str, Any] = dict(
    host="127.0.0.1",
    port=0,
    model_name="tiny",
    kv_memory=ByteSize(4 << 20),
    adapter_memory=ByteSize(16 << 20),
    host_adapter_memory=ByteSize(16 << 20),
    max_upload=ByteSize(64 << 20),
    step_tokens=64,
)


@dataclass
class Running:
    """A server that answers. `engine` is the one inside, for looking at its state."""

    host: str
    port: int
    client: httpx.Client
    openai: OpenAI
    engine: Engine
    settings: Settings

    def upload(self, name: str, folder: Path, **headers: str) -> httpx.Response:
        """The two adapter files in `folder` under `name`."""
        files = [
            ("files", (file, (folder / file).read_bytes())) for file in (CONFIG_FILE, WEIGHTS_FILE)
        ]
        return self.client.post("/v1/adapters", data={"name": name}, files=files, headers=headers)

    def complete(self, model: str = "tiny", headers: Mapping[str, str] = {}, **body: Any) -> Any:
        """POST /v1/completions, which must succeed; greedy unless told otherwise."""
        body = {"model": model, "prompt": "!", "temperature": 0} | body
        response = self.client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    def idle(self) -> bool:
        """Whether the engine holds nothing for any request."""
        stats = self.engine.stats()
        held = stats.running + stats.waiting + stats.adapters.pinned
        return held == 0 and not self.engine._generations

    def connect(self) -> socket.socket:
        """A bare connection, for clients that misbehave."""
        return socket.create_connection((self.host, self.port), timeout=30)


@contextmanager
def serving(model: Path, data: Path, **overrides: Any) -> Iterator[Running]:
    """A server on `model`, stopped in good order at the end."""
    settings = Settings(**(SMALL | {"model": str(model), "data": data} | overrides))
    app = create_app(settings)
    engines: list[Engine] = []
    server = uvicorn.Server(
        uvicorn.Config(_noting(app, engines), port=0, log_level="warning", lifespan="on")
    )
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), 60)
        assert server.started, "the server did not start"
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        url = f"http://{host}:{port}"
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai,
        ):
            client.get("/live").raise_for_status()
            yield Running(host, port, client, openai, engines[0], settings)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for `condition`; AssertionError if it takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds"
        time.sleep(0.01)


def _noting(app: Starlette, engines: list[Engine]) -> Any:
    """`app`, with the engine it works on put into `engines` at its first request."""

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not engines:
            engines.append(scope["state"]["services"].engine)
        await app(scope, receive, send)

    return noting
