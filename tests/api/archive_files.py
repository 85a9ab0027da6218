"""Archives made by hand, good and hostile."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

#: Content does not matter here: nothing in an archive is parsed before it is unpacked.
GOOD = {CONFIG: b"{}", WEIGHTS: b"weights"}


def zip_of(members: Mapping[str, bytes] | Sequence[tuple[zipfile.ZipInfo | str, bytes]]) -> bytes:
    """A deflated zip with the members in order."""
    pairs = list(members.items()) if isinstance(members, Mapping) else members
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in pairs:
            archive.writestr(name, content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def tar_of(
    members: Mapping[str, bytes] | Sequence[tuple[tarfile.TarInfo | str, bytes]],
    format: int = tarfile.PAX_FORMAT,
) -> bytes:
    """A .tar.gz with the members in order; a TarInfo keeps its type and link."""
    pairs = list(members.items()) if isinstance(members, Mapping) else members
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=format) as archive:
        for member, content in pairs:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tar_special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    """A member that is no plain file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info
