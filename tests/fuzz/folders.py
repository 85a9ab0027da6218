"""The target that takes the files of an upload, as they lie in its folder once it is unpacked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from adapters.errors import AdapterRejected
from adapters.foreign import convert
from adapters.manifest import WEIGHTS_FILE, AdapterManifest, AdapterRef
from adapters.peft_files import read_header
from adapters.report import accepted_report, refused_report
from adapters.tokenizer_files import read_tokenizer_files
from adapters.validation import Limits, validate
from adapters.weights import load_weights
from base_engine.model import Decoder
from base_engine.tokenizer import ChatTokenizer


def folder_target(base: Path) -> Callable[[dict[str, bytes], Path], str]:
    """Takes the files of an upload for the model in the folder `base`, by name."""
    decoder = Decoder.load(base, name="tiny", dtype="float32", device="cpu")
    tokenizer = ChatTokenizer.load(base).identity

    def run(files: dict[str, bytes], folder: Path) -> str:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        try:
            convert(folder, decoder.spec)
            read_tokenizer_files(folder, tokenizer)
            manifest = validate(folder, decoder.spec, Limits(), parameters=decoder.parameter)
        except AdapterRejected as error:
            return _refused(folder, error)
        again = AdapterManifest.from_json(json.loads(json.dumps(manifest.to_json())))
        assert again == manifest
        table = read_header(folder / WEIGHTS_FILE)
        json.dumps(accepted_report(manifest, table, decoder.spec, 4))
        ref = AdapterRef(manifest.digest, "fuzz", folder, manifest)
        load_weights(ref, decoder.spec, decoder.dtype, decoder.parameter)
        return "taken"

    return run


def _refused(folder: Path, error: AdapterRejected) -> str:
    try:
        table = read_header(folder / WEIGHTS_FILE)
    except AdapterRejected:
        table = None
    report = json.dumps(refused_report(error.violations, table))
    assert len(report) < 4 << 20, f"a report of {len(report)} bytes"
    assert len(str(error)) <= 400 and error.violations
    report.encode()
    return error.violations[0].code
