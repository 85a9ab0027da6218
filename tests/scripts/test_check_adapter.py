"""Checking an adapter on the command line: what it says, its exit status, what it leaves alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from adapters.pickles import PICKLE_FILE
from scripts.check_adapter import main
from tests.adapters.lora_files import A0, B0, edit_weights
from tests.tiny import make_adapter

ROOT = Path(__file__).resolve().parents[2]
Check = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def pristine(llama_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return make_adapter(llama_base, folder, seed=1, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def adapter(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "adapter"))


@pytest.fixture
def check(llama_base: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs the command against the tiny base; exit status, stdout and stderr."""

    def run(*flags: str | Path, model: bool = True) -> tuple[int, str, str]:
        base = ("--model", str(llama_base), "--adapter-memory", "4MiB") if model else ()
        status = main([*map(str, flags), *base])
        return status, *capsys.readouterr()

    return run


def pickle_of(adapter: Path) -> dict[str, torch.Tensor]:
    """Make the folder one that older peft wrote; the tensors."""
    tensors = load_file(adapter / WEIGHTS_FILE)
    torch.save(tensors, adapter / PICKLE_FILE)
    (adapter / WEIGHTS_FILE).unlink()
    return tensors


def content(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_a_good_adapter_is_accepted_and_left_alone(check: Check, adapter: Path) -> None:
    before = content(adapter)
    status, out, err = check(adapter)
    assert status == 0
    assert f"{adapter} is accepted" in out.replace("\n", "")
    assert "2 × q_proj, rank 4, scale 2" in out and "changes a logit by up to" in out
    assert f"   2 × {A0.replace('.0.', '.*.')} [4, 64] F32  applied" in out
    assert err.startswith("Loading llama")
    assert content(adapter) == before


def test_each_tensor_is_listed_when_asked(check: Check, adapter: Path) -> None:
    _, out, _ = check(adapter, "--tensors", "--no-run")
    role = "applied: LoRA A of model.layers.0.self_attn.q_proj"
    assert f"{A0} [4, 64] F32  {role}\n" in out
    assert "*" not in out


def test_the_json_is_the_report_alone(check: Check, adapter: Path) -> None:
    status, out, _ = check(adapter, "--json")
    report = json.loads(out)
    assert (status, report["status"], report["base"]) == (0, "accepted", "llama")
    assert report["effect"] > 0 and report["tensor_counts"]["applied"] == 8
    status, out, _ = check(adapter, "--json", "--no-run")
    assert json.loads(out) == report | {"effect": None}


def test_what_is_wrong_is_said_of_the_tensor(check: Check, adapter: Path) -> None:
    edit_weights(adapter, lambda tensors: tensors[B0].fill_(float("nan")))
    status, out, _ = check(adapter)
    assert status == 1 and "is refused" in out
    assert f"refused  {B0}: holds 256 values that are NaN" in out and "1 refused" in out
    status, out, _ = check(adapter, "--json")
    assert status == 1 and json.loads(out)["violations"][0]["code"] == "non_finite_weights"


def test_a_rank_over_the_servers_limit_is_refused(check: Check, adapter: Path) -> None:
    status, out, _ = check(adapter, "--max-rank", "3")
    assert status == 1 and "at most 3" in out


def test_an_adapter_without_effect_is_refused_unless_it_is_meant(
    check: Check, adapter: Path
) -> None:
    def silence(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".lora_B." in name:
                tensor.zero_()

    edit_weights(adapter, silence)
    status, out, _ = check(adapter)
    assert status == 1 and "no_effect" in out and "--allow-noop" in out
    status, out, _ = check(adapter, "--allow-noop", "--json")
    assert status == 0 and json.loads(out)["effect"] == 0.0


def test_output_that_overflows_is_refused(check: Check, adapter: Path) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor.fill_(3e38)

    edit_weights(adapter, enlarge)
    status, out, _ = check(adapter)
    assert status == 1 and "output_not_finite" in out


def test_a_pickle_is_refused_at_once_and_converted_on_demand(check: Check, adapter: Path) -> None:
    tensors = pickle_of(adapter)
    status, out, err = check(adapter)
    assert status == 1 and "unexpected_weights" in out and "--convert" in out
    assert "Loading" not in err
    status, out, err = check(adapter, "--convert", model=False)
    assert (status, out) == (0, "")
    assert f"Converted {PICKLE_FILE}" in err and "--model" in err and "Loading" not in err
    converted = load_file(adapter / WEIGHTS_FILE)
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())
    assert check(adapter)[0] == 0


def test_conversion_and_check_go_together(check: Check, adapter: Path) -> None:
    pickle_of(adapter)
    status, out, _ = check(adapter, "--convert")
    assert status == 0 and "is accepted" in out.replace("\n", "")


def test_a_converted_file_is_never_written_over(check: Check, adapter: Path) -> None:
    pickle_of(adapter)
    (adapter / WEIGHTS_FILE).write_bytes(b"mine")
    status, out, _ = check(adapter, "--convert", model=False)
    assert status == 1 and "is not overwritten" in out
    assert (adapter / WEIGHTS_FILE).read_bytes() == b"mine"


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_malicious_pickle_runs_nothing(check: Check, adapter: Path, tmp_path: Path) -> None:
    (adapter / WEIGHTS_FILE).unlink()
    torch.save({"w": Malicious(tmp_path / "marker")}, adapter / PICKLE_FILE)
    status, out, _ = check(adapter, "--convert")
    assert status == 1 and "unsafe_pickle" in out
    assert not (tmp_path / "marker").exists() and not (adapter / WEIGHTS_FILE).exists()


@pytest.mark.parametrize("suffix", ["zip", "tar.gz"])
def test_an_archive_is_checked_as_it_would_be_uploaded(
    check: Check, adapter: Path, tmp_path: Path, suffix: str
) -> None:
    archive = tmp_path / f"mine.{suffix}"
    if suffix == "zip":
        with zipfile.ZipFile(archive, "w") as packed:
            for path in adapter.iterdir():
                packed.write(path, path.name)
            packed.writestr("README.md", "hello")
    else:
        with tarfile.open(archive, "w:gz") as unpacked:
            unpacked.add(adapter, "adapter")
    status, out, _ = check(archive, "--json")
    assert status == 0
    warned = "README.md" in " ".join(json.loads(out)["warnings"])
    assert warned == (suffix == "zip")


def test_a_hostile_archive_is_refused_before_the_base_is_loaded(
    check: Check, tmp_path: Path
) -> None:
    archive = tmp_path / "mine.zip"
    archive.write_bytes(b"PK\x03\x04 no archive")
    status, out, err = check(archive)
    assert status == 1 and "archive_unreadable" in out and "Loading" not in err


def test_marks_in_names_do_not_reach_the_terminal(check: Check, adapter: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["\x1b[2J\u202e" + A0] = tensors.pop(A0)

    edit_weights(adapter, rename)
    status, out, _ = check(adapter)
    assert status == 1
    assert "\x1b" not in out and "\u202e" not in out and "\\x1b[2J\\u202e" in out


def test_another_layout_is_converted_in_a_copy(check: Check, adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS_FILE)
    shutil.rmtree(adapter)
    adapter.mkdir()
    mlx = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("base_model.model.").removesuffix(".weight")
        mlx[short.replace("lora_A", "lora_a").replace("lora_B", "lora_b")] = tensor.T.contiguous()
    save_file(mlx, adapter / "adapters.safetensors")
    keys = ["self_attn.q_proj", "self_attn.v_proj"]
    lora = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": lora}
    (adapter / CONFIG_FILE).write_text(json.dumps(config))
    before = content(adapter)
    status, out, _ = check(adapter, "--json")
    report = json.loads(out)
    assert status == 0, report["violations"]
    assert "MLX-LM" in " ".join(report["warnings"])
    assert content(adapter) == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["/no/such/folder"], "there is no /no/such/folder"),
        (["/etc/hostname"], "is no folder and no archive"),
        (["FOLDER", "--model", "./no-such-base"], "--model: there is no folder no-such-base"),
        (["FOLDER", "--max-rank", "0"], "--max-rank: 0"),
        (["FOLDER", "--device", "tpu"], "--device"),
        (["FOLDER", "--convert"], "there is no adapter_model.bin"),
    ],
)
def test_what_cannot_be_checked_is_neither_accepted_nor_refused(
    check: Check, adapter: Path, llama_base: Path, flags: list[str], words: str
) -> None:
    flags = [str(adapter) if flag == "FOLDER" else flag for flag in flags]
    status, out, err = check(
        *flags, *(() if "--model" in flags else ("--model", str(llama_base))), model=False
    )
    assert (status, out) == (2, "") and words in err


def test_a_wrong_flag_is_a_usage_error(check: Check, adapter: Path) -> None:
    with pytest.raises(SystemExit) as error:
        check(adapter, "--dtype", "int4")
    assert error.value.code == 2


def test_the_command_runs_as_a_process(adapter: Path, llama_base: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "scripts.check_adapter", adapter, "--model", llama_base],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "is accepted" in done.stdout.replace("\n", "")
    assert done.stderr == "Loading llama …\n"
