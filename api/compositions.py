"""POST /v1/compositions: a new adapter version out of several others, weighted."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from adapters.composition import COMBINATIONS, Composition, Source
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE, AdapterRef, BaseSpec
from api.body import read_body
from api.disconnect import while_connected
from api.errors import BadRequest
from api.examination import Upload, examine, report_of
from api.members import Members
from api.publication import publish, staged
from api.records import version_record
from api.refusals import refusal
from api.schemas import AdapterChoice
from api.services import MAX_COMPOSING, Services, services_of, tenant_of
from api.targets import find_summand
from base_engine.errors import QueueFull
from registry.routing import check_name

MAX_SOURCES = 32

#: Seconds after which a composition is given up.
LIMIT_S = 600

_ROOT = Path(__file__).resolve().parent.parent


class CompositionRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Body of POST /v1/compositions; `density` is for the pruning types, and required there."""

    name: str
    adapters: Annotated[list[AdapterChoice], Meta(min_length=1, max_length=MAX_SOURCES)]
    combination_type: Literal[
        "cat", "linear", "ties", "dare_linear", "dare_ties", "magnitude_prune"
    ]
    density: Annotated[float, Meta(gt=0, le=1)] | None = None
    majority_sign_method: Literal["total", "frequency"] = "total"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    allow_noop: bool = False


async def create_composition(request: Request) -> Response:
    """POST /v1/compositions"""
    services, tenant = services_of(request), tenant_of(request)
    asked = _decode(await read_body(request, services.settings.max_body))
    check_name(asked.name, services.engine.base.name)
    refs = _sources(services, tenant, asked)
    request_id = request.headers.get("idempotency-key") or uuid.uuid4().hex
    async with staged(services.blobs) as staging:
        spec = _spec(services.engine.base, asked, refs, staging.path)
        if services.composing.locked():
            raise QueueFull(
                f"{MAX_COMPOSING} compositions are computed, the most at once", retry_after=10
            )
        async with services.composing:
            await while_connected(request.receive, _compose(spec, staging.path))
        upload = Upload(
            tenant,
            asked.name,
            staging.path,
            _members(),
            allow_noop=asked.allow_noop,
            notes=(_provenance(asked, refs),),
        )
        manifest = await examine(services.engine, services.settings, upload)
        report = await asyncio.to_thread(report_of, services.engine, staging.path, manifest)
        version = await publish(services, staging, tenant, asked.name, manifest, request_id)
    services.metrics.uploads.inc()
    status = 201 if version.request_id == request_id else 200
    body = msgspec.json.encode(version_record(asked.name, version) | {"report": report})
    return Response(body, status, media_type="application/json")


def _decode(body: bytes) -> CompositionRequest:
    try:
        asked = msgspec.json.decode(body, type=CompositionRequest)
    except msgspec.ValidationError as error:
        raise refusal(str(error), body, CompositionRequest.__struct_fields__, {}) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if COMBINATIONS[asked.combination_type] != (asked.density is not None):
        needs = "is required for" if asked.density is None else "is not taken with"
        raise BadRequest(f"density: {needs} {asked.combination_type}.", "density")
    return asked


def _sources(services: Services, tenant: str, asked: CompositionRequest) -> list[AdapterRef]:
    refs: list[AdapterRef] = []
    for i, choice in enumerate(asked.adapters):
        where = f"adapters[{i}]"
        ref = find_summand(services, tenant, choice.name, where)
        if not ref.manifest.plain:
            message = (
                f"{where}: {ref.name} is more than LoRA on linear layers; it can't be composed."
            )
            raise BadRequest(message, where, "unsupported_parameter")
        refs.append(ref)
    if asked.combination_type != "cat":
        _check_ranks(asked.combination_type, refs)
    return refs


def _check_ranks(combination_type: str, refs: list[AdapterRef]) -> None:
    """Only concatenation takes a module's ranks as they come."""
    ranks: dict[str, set[int]] = {}
    for ref in refs:
        own: Counter[str] = Counter()
        for lora in ref.manifest.modules:
            own[lora.module] += lora.rank
        for module, rank in own.items():
            ranks.setdefault(module, set()).add(rank)
    for module, found in ranks.items():
        if len(found) > 1:
            raise _impossible(
                f"{module} has the ranks {sorted(found)}; {combination_type} needs equal ones "
                "(cat does not)"
            )


def _spec(
    base: BaseSpec, asked: CompositionRequest, refs: list[AdapterRef], target: Path
) -> Composition:
    adapted = {lora.module for ref in refs for lora in ref.manifest.modules}
    place = {path: i for i, path in enumerate(base.parameters)}
    ordered = sorted(adapted, key=lambda module: place.get(f"{module}.weight", len(place)))
    targets = {module: base.targets[base.module_index[module][0]] for module in ordered}
    return Composition(
        target=str(target),
        base_model=base.name,
        sources=tuple(
            Source(str(ref.folder), ref.manifest.modules, choice.weight)
            for ref, choice in zip(refs, asked.adapters, strict=True)
        ),
        outputs={module: spec.out_features for module, spec in targets.items()},
        combination_type=asked.combination_type,
        density=asked.density,
        majority_sign_method=asked.majority_sign_method,
        seed=asked.seed,
    )


async def _compose(spec: Composition, folder: Path) -> None:
    """Run the composition in a process of its own. Raises BadRequest if it cannot be done."""
    job = folder / "composition.json"
    await asyncio.to_thread(job.write_text, json.dumps(spec.to_json()))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "adapters.merging", str(job)),
        cwd=_ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    except TimeoutError:
        raise _impossible(f"the composition takes longer than {LIMIT_S} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        job.unlink(missing_ok=True)
    if process.returncode == 3:
        raise _impossible(errors.decode(errors="replace").strip()[-500:])
    if process.returncode:
        raise RuntimeError(f"composition failed with status {process.returncode}: {errors!r}")


def _impossible(reason: str) -> BadRequest:
    return BadRequest(f"adapters: cannot be composed so: {reason}.", "adapters", "cannot_compose")


def _members() -> Members:
    members = Members()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        members.select(name)
    return members


def _provenance(asked: CompositionRequest, refs: list[AdapterRef]) -> str:
    parts = zip(refs, asked.adapters, strict=True)
    terms = " + ".join(f"{choice.weight:g} * {ref.name}" for ref, choice in parts)
    options = f", density {asked.density:g}" if asked.density is not None else ""
    if asked.combination_type.endswith("ties"):
        options += f", signs by {asked.majority_sign_method}"
    if asked.combination_type.startswith("dare"):
        options += f", seed {asked.seed}"
    return f"composed by {asked.combination_type}{options}: {terms}"
