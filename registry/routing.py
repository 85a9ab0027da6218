"""From the name a client asks for to the version that answers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from adapters.manifest import BaseSpec
from registry.errors import Conflict, InvalidName, NotFound, WrongBase
from registry.records import Adapter, Version
from registry.snapshot import Snapshot

#: Names no adapter may have: they stand for the base in traces and metrics.
RESERVED = frozenset({"base", "__base__"})

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_NUMBER = re.compile(r"[1-9][0-9]{0,9}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_SHOWN = 200


@dataclass(frozen=True)
class Route:
    """Who answers: `adapter` and `version` are both None for the base. `model` is as asked for."""

    model: str
    adapter: Adapter | None
    version: Version | None


def resolve(snapshot: Snapshot, tenant: str, model: str, base: BaseSpec) -> Route:
    """The route of `model`: the base's name, `name`, `name@latest`, `name@3`, `name@sha256:…`.

    Only versions that were uploaded for `base` answer; the latest is the latest of these.
    Raises NotFound with one and the same message whether the model does not exist, is malformed
    or belongs to another tenant, WrongBase if it is there, but for another base. Nothing but the
    base's exact name ever leads to the base.
    """
    if model == base.name:
        return Route(model, None, None)
    name, at, selector = model.partition("@")
    adapter = snapshot.find(tenant, name)
    named = _select(adapter, selector if at else "latest") if adapter else []
    if adapter is None or not named:
        shown = model if len(model) <= _SHOWN else model[:_SHOWN] + "…"
        raise NotFound(f"The model {shown!r} does not exist.")
    fitting = [version for version in named if fits(version, base)]
    if not fitting:
        raise WrongBase(
            f"The adapter {model!r} was uploaded for the base {named[-1].manifest.base_name!r}, "
            f"and other weights are served here, as {base.name!r}. Upload it again if it is meant "
            "for these."
        )
    return Route(model, adapter, fitting[-1])


def served(snapshot: Snapshot, tenant: str, base: BaseSpec) -> list[Adapter]:
    """The tenant's adapters that have a version for `base`."""
    return [a for a in snapshot.list(tenant) if any(fits(v, base) for v in a.versions)]


def fits(version: Version, base: BaseSpec) -> bool:
    """Whether `version` was uploaded for this very base."""
    return version.manifest.base_digest == base.digest


def check_name(name: str, base_name: str) -> None:
    """Whether an adapter may be called `name`.

    Raises Conflict for the base's name and reserved names, InvalidName for what breaks the rule.
    """
    if name == base_name or name in RESERVED:
        raise Conflict(f"The name {name!r} is reserved for the base model.")
    if not _NAME.fullmatch(name):
        shown = name if len(name) <= _SHOWN else name[:_SHOWN] + "…"
        raise InvalidName(
            f"The adapter name {shown!r} is not allowed: 1 to 64 of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or a digit."
        )


def _select(adapter: Adapter, selector: str) -> list[Version]:
    """The versions that `selector` may mean, the preferred one last."""
    if selector == "latest":
        return list(adapter.versions)
    if _NUMBER.fullmatch(selector):
        return [v for v in adapter.versions if v.number == int(selector)]
    if digest := _DIGEST.fullmatch(selector):
        return [v for v in adapter.versions if v.digest == digest[1]]
    return []
