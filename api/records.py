"""The registry's records as clients see them."""

from __future__ import annotations

from typing import Any

from registry.records import Adapter, Version


def version_record(name: str, version: Version) -> dict[str, Any]:
    """One version of the adapter `name`. `rank` is its largest, `bytes` the size of its weights.

    `base` is the base it was uploaded for, `base_model` what its config names; `effect` is the
    largest change of a logit that was seen before it was accepted.
    """
    manifest = version.manifest
    return {
        "object": "adapter.version",
        "name": name,
        "version": version.number,
        "digest": version.digest,
        "created": version.created,
        "rank": manifest.max_rank,
        "targets": sorted({path.rsplit(".", 1)[-1] for path in manifest.adapted}),
        "parameters": manifest.parameters,
        "bytes": manifest.weights_bytes,
        "dtypes": list(manifest.dtypes),
        "base": manifest.base_name,
        "base_model": manifest.base_model,
        "effect": manifest.effect,
        "warnings": list(manifest.warnings),
    }


def adapter_record(adapter: Adapter) -> dict[str, Any]:
    """One adapter with all its versions, oldest first."""
    return {
        "object": "adapter",
        "name": adapter.name,
        "created": adapter.created,
        "latest": adapter.latest.number,
        "versions": [version_record(adapter.name, version) for version in adapter.versions],
    }


def model_record(
    model: str, created: int, *, parent: str | None, owner: str = "lorikeet"
) -> dict[str, Any]:
    """OpenAI's model object; `parent` is the base of an adapter."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": owner,
        "parent": parent,
    }
