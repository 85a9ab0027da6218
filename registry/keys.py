"""Every Redis key of the registry. All share the hash tag `{reg}`, hence one cluster slot.

| key | type | meaning |
|---|---|---|
| EPOCH | string | random id made by the first write; another one means: emptied and begun anew |
| REVISION | string, int | counts the mutations; equals the id of the last entry in CHANGES |
| ADAPTERS | hash | `tenant/name` → `created first last content` (unix s, first and last version number, content of the last one: its digest and its base's); present exactly while the adapter exists |
| VERSIONS | hash | `tenant/name/number` → packed version (`Version.pack`) |
| NUMBERS | hash | `tenant/name` → highest number ever given; outlives the adapter, so none is reused |
| CHANGES | stream | one entry `revision-0` per mutation: `op` (add, delete, reset), `epoch`, `adapter`, `number`, `version` |
| request_key() | hash with TTL | what a request id did: `fingerprint`, `revision`, `number`, `version` |
"""  # noqa: E501 (one table row per key)

from __future__ import annotations

from registry.errors import InvalidName

PREFIX = "lorikeet:{reg}:"

EPOCH = PREFIX + "epoch"
REVISION = PREFIX + "revision"
ADAPTERS = PREFIX + "adapters"
VERSIONS = PREFIX + "versions"
NUMBERS = PREFIX + "numbers"
CHANGES = PREFIX + "changes"

#: Seconds for which the result of a request id is kept.
REQUEST_TTL = 24 * 3600
#: Entries kept in CHANGES (about; a reader further behind loads everything anew).
CHANGES_KEPT = 1024


def request_key(tenant: str, request_id: str) -> str:
    """The key of one request's result; request ids are scoped by tenant."""
    return f"{PREFIX}request:{tenant}/{request_id}"


def adapter_field(tenant: str, name: str) -> str:
    """The field of an adapter in ADAPTERS and NUMBERS.

    Raises InvalidName if tenant or name is empty or holds a slash: fields would be ambiguous.
    """
    for part in (tenant, name):
        if not part or "/" in part:
            raise InvalidName(f"{part!r} cannot be part of a registry key: empty or with a slash.")
    return f"{tenant}/{name}"


def split_field(field: str) -> tuple[str, str]:
    """The tenant and the name of an `adapter_field`."""
    tenant, _, name = field.partition("/")
    return tenant, name
