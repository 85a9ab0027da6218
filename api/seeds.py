"""Adapters that come with the server, published once: what a user deletes stays deleted."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from pathlib import Path

from adapters.errors import AdapterRejected
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from api.examination import Upload, examine
from api.members import Members
from api.publication import publish, staged
from api.services import DEFAULT_TENANT, Services
from registry.routing import check_name, fits

_SEEDED_FILE = "seeded.json"

_log = logging.getLogger("lorikeet.seeds")


async def seed(services: Services, folder: Path) -> list[str]:
    """Publish each sub-folder of `folder` never published here for this base; returns their names.

    An adapter that this base cannot serve is left out with a warning and tried again next time.
    """
    marker = services.settings.data / _SEEDED_FILE
    done = set(json.loads(marker.read_text())) if marker.exists() else set()
    added = []
    base = services.engine.base
    for source in _sources(folder):
        entry = f"{source.name} for {base.digest}"
        if entry in done:
            continue
        known = services.store.snapshot.find(DEFAULT_TENANT, source.name)
        if known is None or not any(fits(version, base) for version in known.versions):
            try:
                await _publish(services, source)
            except AdapterRejected as error:
                _log.warning("adapter %s does not fit this base: %s", source.name, error)
                continue
            added.append(source.name)
        done.add(entry)
        _write(marker, sorted(done))
    return added


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if (path / CONFIG_FILE).is_file())


async def _publish(services: Services, source: Path) -> None:
    check_name(source.name, services.engine.base.name)
    async with staged(services.blobs) as staging:
        members = Members()
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            members.select(name)
            await asyncio.to_thread(shutil.copyfile, source / name, staging.path / name)
        upload = Upload(DEFAULT_TENANT, source.name, staging.path, members)
        manifest = await examine(services.engine, services.settings, upload)
        request_id = f"seed:{source.name}:{manifest.digest[:16]}:{manifest.base_digest[:16]}"
        await publish(services, staging, DEFAULT_TENANT, source.name, manifest, request_id)


def _write(marker: Path, names: list[str]) -> None:
    temporary = marker.with_suffix(".new")
    temporary.write_text(json.dumps(names))
    os.replace(temporary, marker)
