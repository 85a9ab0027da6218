"""What the registry knows: adapters and their versions, immutable."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from adapters.manifest import AdapterManifest, ModuleLora, read_parts


@dataclass(frozen=True)
class Version:
    """One uploaded set of weights. `number` counts from 1 within its adapter, never reused.

    `created` is in unix seconds, `request_id` the request that made it.
    """

    number: int
    digest: str
    created: int
    manifest: AdapterManifest
    request_id: str

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "digest": self.digest,
            "created": self.created,
            "request_id": self.request_id,
            "manifest": self.manifest.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Version:
        """Raises KeyError or TypeError if `data` is not what `to_json` makes."""
        return cls(
            number=int(data["number"]),
            digest=str(data["digest"]),
            created=int(data["created"]),
            manifest=AdapterManifest.from_json(data["manifest"]),
            request_id=str(data["request_id"]),
        )

    def pack(self) -> bytes:
        """The stored form: compressed JSON without the number, which only Redis can assign.

        A manifest lists hundreds of modules with much repetition: about 50 kB become 3 kB. Many
        adapters have the very same list; it is a text of its own, so that it is decoded once.
        """
        data = self.to_json()
        del data["number"]
        data["modules"] = json.dumps(data["manifest"].pop("modules"), separators=(",", ":"))
        return zlib.compress(json.dumps(data, separators=(",", ":")).encode(), level=1)

    @classmethod
    def unpack(cls, number: int, packed: bytes) -> Version:
        """The inverse of `pack`. Raises ValueError if `packed` is damaged."""
        try:
            data = json.loads(zlib.decompress(packed))
            data["manifest"]["modules"] = ()
            version = cls.from_json({**data, "number": number})
            manifest = replace(version.manifest, modules=_modules(data["modules"]))
            return replace(version, manifest=manifest)
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"stored version {number} cannot be read: {error!r}") from error


@dataclass(frozen=True)
class Adapter:
    """A tenant's adapter with its versions, oldest first, at least one. `created`: unix seconds."""

    tenant: str
    name: str
    created: int
    versions: tuple[Version, ...]

    @property
    def latest(self) -> Version:
        return self.versions[-1]

    def to_json(self) -> dict[str, Any]:
        return {
            "tenant": self.tenant,
            "name": self.name,
            "created": self.created,
            "versions": [version.to_json() for version in self.versions],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Adapter:
        """Raises KeyError or TypeError if `data` is not what `to_json` makes."""
        return cls(
            tenant=str(data["tenant"]),
            name=str(data["name"]),
            created=int(data["created"]),
            versions=tuple(Version.from_json(version) for version in data["versions"]),
        )


@lru_cache(maxsize=256)
def _modules(text: str) -> tuple[ModuleLora, ...]:
    # Adapters trained with one configuration share one tuple in memory.
    return read_parts(ModuleLora, json.loads(text))
