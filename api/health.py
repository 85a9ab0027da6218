"""Probes: is the process worth keeping, and should it get requests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from api.services import Services, services_of


async def live(request: Request) -> Response:
    """GET /live: 503 when the engine is dead or hangs in a step; a restart is then needed."""
    problem = _problem(services_of(request))
    return _probe("alive", problem)


async def ready(request: Request) -> Response:
    """GET /ready, also /health: 503 when requests cannot be answered.

    A registry that cannot be reached makes the server read-only, not unready.
    """
    services = services_of(request)
    registry = "stale" if services.store.snapshot.stale else "ok"
    return _probe("ready", _problem(services), registry=registry)


async def metrics(request: Request) -> Response:
    """GET /metrics"""
    services = services_of(request)
    return Response(services.metrics.render(), media_type=services.metrics.content_type)


def _problem(services: Services) -> str | None:
    if not services.engine.healthy:
        return "the engine has stopped"
    busy = services.engine.stats().busy_s
    if busy > services.settings.stall_seconds:
        return f"a step has been running for {busy:.0f} seconds"
    return None


def _probe(status: str, problem: str | None, **details: str) -> Response:
    if problem is not None:
        return JSONResponse({"status": "unavailable", "problem": problem, **details}, 503)
    return JSONResponse({"status": status, **details})
