"""The application: the only place where things are built and put together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from api import adapter_routes, completions, compositions, health, models, steps, uploads
from api.errors import FAULTS, error_response
from api.metrics import Metrics
from api.middleware import AnswerFailures, CountRequests, LogRequests, RequestId
from api.seeds import seed
from api.services import Services
from api.settings import Settings
from base_engine.engine import Engine
from registry.blobs import BlobStore
from registry.embedded import EmbeddedServer
from registry.errors import RegistryUnavailable
from registry.rebuild import rebuild
from registry.store import RegistryStore

#: Blobs younger than this are never swept: a blob is there before its record.
SWEEP_MIN_AGE_S = 3600.0
SWEEP_EVERY_S = 600.0

ROUTES = [
    Route("/v1/chat/completions", completions.chat_completions, methods=["POST"]),
    Route("/v1/completions", completions.completions, methods=["POST"]),
    Route("/v1/models", models.list_models),
    Route("/v1/models/{model:path}", models.get_model),
    Route("/v1/adapters", adapter_routes.list_adapters, methods=["GET"]),
    Route("/v1/adapters", uploads.create_adapter, methods=["POST"]),
    Route("/v1/adapters/{name}", adapter_routes.get_adapter, methods=["GET"]),
    Route("/v1/adapters/{name}", adapter_routes.delete_adapter, methods=["DELETE"]),
    Route("/v1/adapters/{name}/versions/{number}", adapter_routes.get_version),
    Route("/v1/adapters/{name}/versions/{number}/report", adapter_routes.get_report),
    Route("/v1/compositions", compositions.create_composition, methods=["POST"]),
    Route("/v1/engine/steps", steps.list_steps),
    Route("/live", health.live),
    Route("/ready", health.ready),
    Route("/health", health.ready),
    Route("/metrics", health.metrics),
]

_log = logging.getLogger("lorikeet")


def create_app(settings: Settings) -> Starlette:
    """The server as an ASGI application. The base is loaded when its lifespan starts."""
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[Mapping[str, Any]]:
        async with AsyncExitStack() as stack:
            yield {"services": await _start(settings, metrics, stack)}

    kinds = [HTTPException, *(kind for kind, _ in FAULTS)]
    app = Starlette(
        routes=ROUTES,
        middleware=[
            Middleware(RequestId),
            *([Middleware(LogRequests)] if settings.log_requests else []),
            Middleware(CountRequests, metrics=metrics),
            Middleware(AnswerFailures),
        ],
        exception_handlers=dict.fromkeys(kinds, error_response),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


async def _start(settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> Services:
    """Start every part; `stack` stops them again in reverse order."""
    settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    url = settings.redis
    if url is None:
        server = EmbeddedServer(settings.data / "registry")
        stack.push_async_callback(server.stop)
        url = await server.start()

    # Before the store: loading starves the event loop, and the store would think Redis is slow.
    config, name = settings.engine_config(), settings.public_name
    engine = await asyncio.to_thread(Engine, settings.model, config, name, metrics.on_step)
    stack.push_async_callback(asyncio.to_thread, engine.stop)
    engine.start()
    metrics.watch(engine)

    store = await RegistryStore.open(url)
    stack.push_async_callback(store.close)
    blobs = await asyncio.to_thread(BlobStore, settings.data / "adapters")
    await rebuild(store, blobs)
    services = Services(settings, engine, store, blobs, metrics, int(time.time()))
    sweeper = asyncio.create_task(_keep_sweeping(services))
    stack.push_async_callback(_cancel, sweeper)
    if settings.seed_adapters is not None:
        await seed(services, settings.seed_adapters)
    return services


async def _keep_sweeping(services: Services) -> None:
    """Remove what cut uploads and deleted adapters left behind, now and again and again."""
    while True:
        try:
            referenced = services.store.snapshot.digests()
        except RegistryUnavailable as error:
            _log.warning("blobs are not swept: %s", error)
        else:
            in_use = services.engine.digests_in_use()
            removed = await asyncio.to_thread(
                services.blobs.sweep, referenced, in_use, SWEEP_MIN_AGE_S
            )
            if removed:
                _log.info("swept %d blobs that no adapter refers to", len(removed))
        await asyncio.sleep(SWEEP_EVERY_S)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
