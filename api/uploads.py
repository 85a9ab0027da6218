"""POST /v1/adapters: a form streamed to disk, checked, and published as a new version."""

from __future__ import annotations

import asyncio
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from adapters.report import Report
from api.errors import BadRequest
from api.examination import Upload, examine, report_of
from api.publication import publish, staged
from api.records import version_record
from api.services import services_of, tenant_of
from api.upload_form import UploadForm, flag


async def create_adapter(request: Request) -> Response:
    """POST /v1/adapters; `?validate_only=true` does all but keep it."""
    services, tenant = services_of(request), tenant_of(request)
    validate_only = _validate_only(request)
    request_id = request.headers.get("idempotency-key") or uuid.uuid4().hex
    async with staged(services.blobs) as staging:
        form = UploadForm(staging.path, services.settings.max_upload, services.engine.base.name)
        await form.receive(request)
        upload = Upload(
            tenant,
            form.name,
            staging.path,
            form.members,
            archive=form.archive,
            digest=form.digest,
            allow_noop=form.allow_noop,
        )
        manifest = await examine(services.engine, services.settings, upload)
        report = await asyncio.to_thread(report_of, services.engine, staging.path, manifest)
        if validate_only:
            return _answer({"object": "adapter.report", "name": form.name, "report": report}, 200)
        version = await publish(services, staging, tenant, form.name, manifest, request_id)
    services.metrics.uploads.inc()
    # Content equal to the latest version's makes no new one.
    status = 201 if version.request_id == request_id else 200
    return _answer(version_record(form.name, version) | {"report": report}, status)


def _answer(body: dict[str, str | Report], status: int) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _validate_only(request: Request) -> bool:
    for name in request.query_params:
        if name != "validate_only":
            message = f"{name[:100]}: unknown parameter; validate_only is taken."
            raise BadRequest(message, name[:100], "unknown_parameter")
    return flag("validate_only", request.query_params.get("validate_only", "false"))
