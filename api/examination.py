"""Whether an upload is taken: its files checked one and all, then tried out on the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from adapters.errors import AdapterRejected, Violation
from adapters.foreign import convert
from adapters.manifest import WEIGHTS_FILE, AdapterManifest, AdapterRef
from adapters.peft_files import content_digest, read_header
from adapters.report import Report, accepted_report, refused_report
from adapters.tokenizer_files import TOKENIZER_FILES, TokenizerFiles, read_tokenizer_files
from adapters.validation import Limits, validate
from api.archives import unpack
from api.members import Members
from api.settings import Settings
from api.upload_form import ARCHIVE_FILE
from base_engine.engine import Engine
from base_engine.sampler import LogitsNotFinite
from base_engine.template_process import check_template
from base_engine.tokenizer import ChatTemplateError


@dataclass(frozen=True)
class Upload:
    """What one tenant sent, staged in `folder`.

    `archive` is the client's name of the archive staged as ARCHIVE_FILE, None if there is none;
    `digest` the content digest that the client expects, "" for any; `notes` go among the warnings.
    """

    tenant: str
    name: str
    folder: Path
    members: Members
    archive: str | None = None
    digest: str = ""
    allow_noop: bool = False
    notes: tuple[str, ...] = ()


async def examine(
    engine: Engine, settings: Settings, upload: Upload, *, run: bool = True
) -> AdapterManifest:
    """Check everything about `upload` and, with `run`, try it out on the engine.

    Afterwards its folder holds the two adapter files alone. Raises AdapterRejected with all
    violations and the report, and what `Engine.effect` raises.
    """
    try:
        manifest = await asyncio.to_thread(_inspect, engine, settings, upload)
        return await _try_out(engine, upload, manifest) if run else manifest
    except AdapterRejected as error:
        error.report = await asyncio.to_thread(_refusal, upload, error)
        raise


def report_of(engine: Engine, folder: Path, manifest: AdapterManifest) -> Report:
    """The report on the accepted adapter in `folder`. Blocks. Raises AdapterRejected or OSError
    if its files are damaged."""
    table = read_header(folder / WEIGHTS_FILE)
    return accepted_report(manifest, table, engine.base, engine.adapters.buffer.itemsize)


def _inspect(engine: Engine, settings: Settings, upload: Upload) -> AdapterManifest:
    """Unpack what is packed and check the files. Raises AdapterRejected with all violations."""
    folder, members = upload.folder, upload.members
    if upload.archive is not None:
        packed = folder / ARCHIVE_FILE
        unpack(packed, upload.archive, folder, settings.max_upload, members)
        packed.unlink()
    members.finish()
    for name in members.misplaced:
        (folder / name).unlink(missing_ok=True)
    violations = list(members.violations)
    if not any(violation.code.startswith("archive_") for violation in violations):
        try:
            manifest = _validated(engine, settings, upload)
        except AdapterRejected as error:
            violations += [members.explained(violation) for violation in error.violations]
    if violations:
        raise AdapterRejected(violations)
    return manifest


def _validated(engine: Engine, settings: Settings, upload: Upload) -> AdapterManifest:
    folder = upload.folder
    _check_digest(upload)
    notes = [*upload.notes, *upload.members.warnings, *convert(folder, engine.base)]
    files = read_tokenizer_files(folder, engine.tokenizer.identity)
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
    limits = Limits(
        max_rank=settings.max_rank,
        max_pages_bytes=settings.adapter_memory,
        element_bytes=engine.adapters.buffer.itemsize,
        dtype=settings.dtype,
    )
    manifest = validate(folder, engine.base, limits, notes, parameters=engine.decoder.parameter)
    manifest = replace(manifest, tokenizer=files.findings)
    allowed = settings.may_bring_tokenizer(upload.tenant)
    return _with_tokenizer(engine, manifest, files, upload.tenant, allowed=allowed)


def _check_digest(upload: Upload) -> None:
    """Compare with what the client expects; before anything is converted."""
    try:
        digest = content_digest(upload.folder) if upload.digest else ""
    except OSError:
        return  # a file is missing, which is told elsewhere
    if digest != upload.digest:
        message = f"the files' content digest is {digest}, not {upload.digest}"
        raise AdapterRejected([Violation("digest_mismatch", "digest", message)])


def _with_tokenizer(
    engine: Engine,
    manifest: AdapterManifest,
    files: TokenizerFiles,
    tenant: str,
    *,
    allowed: bool,
) -> AdapterManifest:
    """`manifest` with the upload's added tokens and chat template, if the tenant may have them.

    A larger vocabulary needs them: without, nobody could write or read its tokens.
    """
    if allowed and files.usable:
        if files.chat_template is not None:
            special = {**engine.tokenizer.identity.special_tokens, **dict(files.special_tokens)}
            try:
                check_template(files.chat_template, special)
            except ChatTemplateError as error:
                violation = Violation("invalid_chat_template", "chat_template", str(error))
                raise AdapterRejected([violation]) from None
        manifest = replace(
            manifest,
            added_tokens=files.added_tokens,
            chat_template=files.chat_template,
            special_tokens=files.special_tokens,
            eos_ids=files.eos_ids,
        )
    known = manifest.vocab_size or engine.base.vocab_size
    if manifest.vocab_size and not manifest.added_tokens:
        message = (
            f"has {known} token ids where the base has {engine.base.vocab_size}; the tokenizer "
            "that knows the others "
        )
        if allowed:
            message += f"must be uploaded with it ({'; '.join(files.findings) or 'none came'})"
        else:
            message += f"is only used if the operator allows it (--adapter-tokenizers {tenant})"
        raise AdapterRejected([Violation("tokenizer_needed", WEIGHTS_FILE, message)])
    beyond = [token for token in manifest.added_tokens if token.id >= known]
    if beyond:
        message = f"gives {beyond[0].content!r} the id {beyond[0].id}; the weights have {known} ids"
        raise AdapterRejected([Violation("token_without_weights", "tokenizer.json", message)])
    return manifest


async def _try_out(engine: Engine, upload: Upload, manifest: AdapterManifest) -> AdapterManifest:
    """`manifest` with the largest change of a logit that the adapter brings about."""
    ref = AdapterRef(manifest.digest, upload.name, upload.folder, manifest)
    # If stored files of this content were damaged before, that must not count against it now.
    engine.forget(manifest.digest)
    try:
        effect = await engine.effect(ref)
    except LogitsNotFinite:
        message = "the model's output with it is not finite; its weights are too large"
        violation = Violation("output_not_finite", WEIGHTS_FILE, message)
        raise AdapterRejected([violation]) from None
    finally:
        # Its folder will not be there for long.
        engine.forget(manifest.digest)
    if effect == 0.0 and not upload.allow_noop:
        message = (
            "changes no output on the prompts it was tried on, so it would answer as the base "
            "does; send allow_noop=true (check_adapter: --allow-noop) if that is meant"
        )
        raise AdapterRejected([Violation("no_effect", WEIGHTS_FILE, message)])
    return replace(manifest, effect=effect)


def _refusal(upload: Upload, error: AdapterRejected) -> Report:
    try:
        table = read_header(upload.folder / WEIGHTS_FILE)
    except (AdapterRejected, OSError):
        table = None
    warnings = (*upload.notes, *upload.members.warnings)
    return refused_report(error.violations, table, warnings=warnings)
