"""GET and DELETE of /v1/adapters; uploads are in `api.uploads`."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from adapters.errors import AdapterRejected, AdapterUnavailable
from api.errors import Missing
from api.examination import report_of
from api.records import adapter_record, version_record
from api.services import services_of, tenant_of
from registry.errors import NotFound, RegistryUnavailable, WrongBase
from registry.records import Version
from registry.routing import fits


async def list_adapters(request: Request) -> Response:
    """GET /v1/adapters"""
    adapters = services_of(request).store.snapshot.list(tenant_of(request))
    return JSONResponse({"object": "list", "data": [adapter_record(a) for a in adapters]})


async def get_adapter(request: Request) -> Response:
    """GET /v1/adapters/{name}"""
    name = request.path_params["name"]
    adapter = services_of(request).store.snapshot.find(tenant_of(request), name)
    if adapter is None:
        raise _missing(name)
    return JSONResponse(adapter_record(adapter))


async def get_version(request: Request) -> Response:
    """GET /v1/adapters/{name}/versions/{number}"""
    name, version = _version(request)
    return JSONResponse(version_record(name, version))


async def get_report(request: Request) -> Response:
    """GET /v1/adapters/{name}/versions/{number}/report"""
    services = services_of(request)
    name, version = _version(request)
    if not fits(version, services.engine.base):
        raise WrongBase(
            f"Version {version.number} of {name!r} was uploaded for the base "
            f"{version.manifest.base_name!r}; the report can be made while that one is served."
        )
    try:
        folder = services.blobs.open(version.digest)
        report = await asyncio.to_thread(report_of, services.engine, folder, version.manifest)
    except (NotFound, AdapterRejected, OSError) as error:
        raise AdapterUnavailable(f"version {version.number} of {name!r}: {error}") from error
    body = {"object": "adapter.report", "name": name, "version": version.number, "report": report}
    return JSONResponse(body)


async def delete_adapter(request: Request) -> Response:
    """DELETE /v1/adapters/{name}: all versions. Requests that run on one finish on it."""
    services, tenant, name = services_of(request), tenant_of(request), request.path_params["name"]
    request_id = request.headers.get("idempotency-key") or uuid.uuid4().hex
    try:
        deleted = await services.store.delete_adapter(tenant, name, request_id=request_id)
    except NotFound:
        raise _missing(name) from None
    for version in deleted:
        await asyncio.to_thread(
            services.blobs.remove_record, version.digest, tenant, name, version.number
        )
    digests = {version.digest for version in deleted}
    # A stale registry cannot tell whether others use the same content: the pool evicts it later.
    with contextlib.suppress(RegistryUnavailable):
        for digest in digests - services.store.snapshot.digests():
            services.engine.forget(digest)
    return JSONResponse({"object": "adapter.deleted", "name": name, "deleted": True})


def _version(request: Request) -> tuple[str, Version]:
    name, number = request.path_params["name"], request.path_params["number"]
    adapter = services_of(request).store.snapshot.find(tenant_of(request), name)
    if adapter is None:
        raise _missing(name)
    for version in adapter.versions:
        if str(version.number) == number:
            return name, version
    message = f"The adapter {name[:200]!r} has no version {number[:20]!r}."
    raise Missing(message, code="adapter_not_found")


def _missing(name: str) -> Missing:
    return Missing(f"The adapter {name[:200]!r} does not exist.", code="adapter_not_found")
