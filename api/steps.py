"""GET /v1/engine/steps: which adapters shared a forward pass."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from api.errors import BadRequest
from api.services import services_of, tenant_of
from base_engine.request import StepRecord

DEFAULT_LIMIT = 100


async def list_steps(request: Request) -> Response:
    """GET /v1/engine/steps?limit=N: the last N steps, oldest first."""
    services = services_of(request)
    limit = _limit(request, services.engine.config.steps_kept)
    # One content may have several names; the first one stands for it.
    names = {
        version.digest: f"{adapter.name}@{version.number}"
        for adapter in reversed(services.store.snapshot.list(tenant_of(request)))
        for version in adapter.versions
    }
    steps = [_step(step, names) for step in services.engine.steps(limit)]
    return JSONResponse({"object": "list", "data": steps})


def _step(step: StepRecord, names: dict[str, str]) -> dict[str, Any]:
    return {
        "step": step.number,
        "started": step.started,
        "seconds": step.seconds,
        "prefill_tokens": step.prefill_tokens,
        "decode_tokens": step.decode_tokens,
        "tokens": {_names(digests, names): count for digests, count in step.tokens.items()},
    }


def _names(digests: str, names: dict[str, str]) -> str:
    """Several weighted adapters of one row are joined by "+"."""
    if digests == "base":
        return digests
    return "+".join(sorted(names.get(d, f"sha256:{d}") for d in digests.split("+")))


def _limit(request: Request, most: int) -> int:
    text = request.query_params.get("limit", str(min(DEFAULT_LIMIT, most)))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= most or len(text) > 9:
        raise BadRequest(f"limit: {text[:50]!r} is not a number from 1 to {most}.", "limit")
    return int(text)
