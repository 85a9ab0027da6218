"""What the endpoints work with. Built once by `api.app`, read from the request by `services_of`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request

from api.metrics import Metrics
from api.settings import Settings
from base_engine.engine import Engine
from registry.blobs import BlobStore
from registry.store import RegistryStore

#: Compositions that are computed at once: each takes a process and the sources' memory.
MAX_COMPOSING = 2

#: Who every request belongs to. An authentication middleware sets `scope["tenant"]` instead.
DEFAULT_TENANT = "default"


@dataclass(frozen=True)
class Services:
    """The long-lived parts of one server. `started` is the unix time at which it was ready;
    `composing` is held by each composition while it is computed."""

    settings: Settings
    engine: Engine
    store: RegistryStore
    blobs: BlobStore
    metrics: Metrics
    started: int
    composing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_COMPOSING))


def services_of(request: Request) -> Services:
    services: Services = request.state.services
    return services


def tenant_of(request: Request) -> str:
    """The tenant that the request acts for; never taken from its body."""
    tenant: str = request.scope.get("tenant", DEFAULT_TENANT)
    return tenant
