"""GET /v1/models: the base and the tenant's adapters."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from api.records import model_record
from api.services import services_of, tenant_of
from registry.routing import resolve, served


async def list_models(request: Request) -> Response:
    """GET /v1/models: what can be asked now; adapters of other bases are left out."""
    services = services_of(request)
    base = services.engine.base
    adapters = served(services.store.snapshot, tenant_of(request), base)
    data = [model_record(base.name, services.started, parent=None)]
    data += [model_record(a.name, a.created, parent=base.name) for a in adapters]
    return JSONResponse({"object": "list", "data": data})


async def get_model(request: Request) -> Response:
    """GET /v1/models/{model}: whatever a request may name as its model."""
    services = services_of(request)
    base = services.engine.base
    model = request.path_params["model"]
    route = resolve(services.store.snapshot, tenant_of(request), model, base)
    if route.adapter is None or route.version is None:
        return JSONResponse(model_record(base.name, services.started, parent=None))
    created = route.adapter.created if "@" not in model else route.version.created
    return JSONResponse(model_record(model, created, parent=base.name))
