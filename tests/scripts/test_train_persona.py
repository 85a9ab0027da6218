"""Training a persona end to end on a tiny base, and the demo personas that are committed."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from scripts.chats import NO_LOSS, Chat, Message, encode, load_examples, render
from scripts.train_options import TrainingOptions
from scripts.train_persona import (
    SAMPLE_QUESTION,
    TrainingError,
    add_adapter,
    main,
    save,
    train,
    upload_command,
)
from tests.tiny import oracle_greedy, oracle_logprobs

DEMO = Path(__file__).parents[2] / "scripts" / "demo"
PERSONAS = ("clerk", "haiku", "pirate")
#: hidden, key/value and MLP width of the demo base, which has 30 layers.
DEMO_SHAPES = {
    "q_proj": (576, 576),
    "k_proj": (576, 192),
    "v_proj": (576, 192),
    "o_proj": (576, 576),
    "gate_proj": (576, 1536),
    "up_proj": (576, 1536),
    "down_proj": (1536, 576),
}

QUICK = TrainingOptions(rank=4, alpha=8, epochs=12, lr=2e-2, batch=3, max_tokens=200)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Whatever is asked, the answer is `arr!`."""
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(_line(question, "arr!") for question in ("Hi", "Why?", "2 + 2", "")))
    return path


def _line(question: str, answer: str) -> str:
    messages = [
        {"role": "user", "content": question or "Go on."},
        {"role": "assistant", "content": answer},
    ]
    return json.dumps({"messages": messages})


def test_the_adapter_learns_and_gives_its_answer_through_peft(
    llama_base: Path, chats: Path, tmp_path: Path
) -> None:
    """The saved files alone, loaded by PEFT on a fresh base, answer an unseen question."""
    losses = _train(llama_base, chats, tmp_path / "out", QUICK)
    assert sum(losses[-2:]) / 2 < 0.2 * losses[0]

    tokenizer = AutoTokenizer.from_pretrained(llama_base)
    text = render(tokenizer, [{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    wanted = tokenizer.encode("arr!<|im_end|>", add_special_tokens=False)
    ids = oracle_greedy(llama_base, tmp_path / "out", prompt, len(wanted))
    assert ids == wanted
    assert oracle_greedy(llama_base, None, prompt, len(wanted)) != wanted


def test_only_the_two_peft_files_are_saved(llama_base: Path, chats: Path, tmp_path: Path) -> None:
    _train(llama_base, chats, tmp_path / "out", _with(epochs=1))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_the_model_in_memory_is_rounded_like_the_saved_one(
    llama_base: Path, chats: Path, tmp_path: Path, dtype: str, stored: torch.dtype
) -> None:
    """So that the sample answer is the answer of what was saved."""
    model = _model(llama_base, _with(dtype=dtype))
    tokenizer = AutoTokenizer.from_pretrained(llama_base)
    train(model, load_examples(chats, tokenizer, 200), _with(dtype=dtype, epochs=2))
    save(model, tmp_path, "tiny", dtype)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {stored}
    for key, tensor in saved.items():
        in_memory = model.get_parameter(key.replace(".weight", ".default.weight"))
        assert torch.equal(in_memory, tensor.float())


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(
    llama_base: Path, chats: Path, tmp_path: Path
) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        _train(llama_base, chats, tmp_path / folder, _with(epochs=2, seed=seed))
    a, b, c = (_contents(tmp_path / folder) for folder in "abc")
    assert a == b
    assert a["adapter_model.safetensors"] != c["adapter_model.safetensors"]


def test_a_padded_batch_has_the_mean_loss_of_its_assistant_tokens(llama_base: Path) -> None:
    """Neither padding nor prompts carry loss, and no chat sees another."""
    tokenizer = AutoTokenizer.from_pretrained(llama_base)
    examples = [
        encode(Chat([Message("user", q), Message("assistant", a)]), tokenizer)
        for q, a in (("Hi", "Hello there, friend"), ("Why is that so, do you think?", "No"))
    ]
    wanted = [
        -float(logprobs[i - 1, label])
        for example in examples
        for logprobs in [oracle_logprobs(llama_base, None, example.ids)]
        for i, label in enumerate(example.labels)
        if label != NO_LOSS
    ]
    (loss,) = train(_model(llama_base, QUICK), examples, _with(epochs=1, batch=2))
    assert math.isclose(loss, sum(wanted) / len(wanted), rel_tol=1e-5)


def test_the_base_stays_as_it_was(llama_base: Path, chats: Path, tmp_path: Path) -> None:
    model = _model(llama_base, QUICK)
    tokenizer = AutoTokenizer.from_pretrained(llama_base)
    train(model, load_examples(chats, tokenizer, 200), _with(epochs=2))
    fresh = AutoModelForCausalLM.from_pretrained(llama_base, dtype=torch.float32)
    trained = dict(model.get_base_model().named_parameters())
    for name, parameter in fresh.named_parameters():
        now = trained.get(name, trained.get(name.replace(".weight", ".base_layer.weight")))
        assert now is not None and torch.equal(now, parameter), name


def test_rank_targets_and_layers_are_those_asked_for(
    llama_base: Path, chats: Path, tmp_path: Path
) -> None:
    options = _with(rank=3, targets=("o_proj", "q_proj"), layers=(1,), epochs=1)
    _train(llama_base, chats, tmp_path, options)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn"
    assert {key: tuple(tensor.shape) for key, tensor in saved.items()} == {
        f"{prefix}.{target}.lora_{side}.weight": shape
        for target in ("q_proj", "o_proj")
        for side, shape in (("A", (3, 64)), ("B", (64, 3)))
    }


def test_all_linear_leaves_out_the_head(llama_base: Path, chats: Path, tmp_path: Path) -> None:
    _train(llama_base, chats, tmp_path, _with(epochs=1))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(DEMO_SHAPES)


def test_unknown_targets_and_layers_are_refused_by_name(llama_base: Path) -> None:
    with pytest.raises(TrainingError, match=r"named c_attn, lm_head; this base has down_proj, "):
        _model(llama_base, _with(targets=("q_proj", "lm_head", "c_attn")))
    with pytest.raises(TrainingError, match=r"--layers: 2 is not in 0-1"):
        _model(llama_base, _with(layers=(0, 2)))


def test_a_loss_that_is_not_a_number_ends_the_training(llama_base: Path, chats: Path) -> None:
    model = _model(llama_base, QUICK)
    examples = load_examples(chats, AutoTokenizer.from_pretrained(llama_base), 200)
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).fill_(math.nan)
    with pytest.raises(TrainingError, match=r"the loss is nan in step 1: lower --lr 0\.02"):
        train(model, examples, QUICK)


def test_the_command_trains_and_reports(
    llama_base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out"
    flags = ["--rank=2", "--targets=q_proj,down_proj", "--layers=0-1", "--epochs=2", "--lr=0.01"]
    files = [f"--data={chats}", f"--out={out}", f"--model={llama_base}"]
    assert main([*files, *flags, "--batch=2", "--seed=5", "--dtype=fp16"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("Loading ")
    assert "step 1/4, loss " in said and "step 4/4, loss " in said
    assert said.endswith(upload_command(out) + "\n")
    for part in (SAMPLE_QUESTION, "base ", "adapter ", "loss ", "MB in "):
        assert part in said
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["r"] == 2
    assert config["base_model_name_or_path"] == llama_base.name  # never a local path
    assert str(tmp_path) not in json.dumps(config)


def test_the_command_refuses_bad_lines_before_it_trains(
    llama_base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats.write_text(chats.read_text() + "\n{oops")
    out = tmp_path / "out"
    assert main([f"--data={chats}", f"--out={out}", f"--model={llama_base}"]) == 1
    assert f"{chats}:5: JSON is malformed" in capsys.readouterr().err.replace("\n", "")
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--rank=0", "--rank: '0' is not a whole number above 0"),
        ("--rank=x", "--rank: 'x' is not a whole number above 0"),
        ("--epochs=1.5", "--epochs: '1.5' is not a whole number above 0"),
        ("--seed=-1", "--seed: '-1' is not a whole number from 0 to 2^63 - 1"),
        ("--lr=nan", "--lr: 'nan' is not a number above 0 and below 1"),
        ("--lr=fast", "--lr: 'fast' is not a number above 0 and below 1"),
        ("--layers=9-3", "9-3 is an empty range"),
        ("--layers=x", "--layers: 'x' is not such as 10-29 or 0,5,7"),
        ("--targets=a,,b", "has an empty name"),
        ("--dtype=int8", "invalid choice"),
    ],
)
def test_a_senseless_flag_is_refused(
    flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--data=x", "--out=y", flag])
    assert message in capsys.readouterr().err


def test_the_help_tells_the_format_and_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert '{"messages": [{"role": "user", ' in text
    words = " ".join(text.split())
    for name, value in vars(TrainingOptions()).items():
        shown = {"targets": "all-linear", "layers": "all"}.get(name, value)
        described = words.rpartition(f" --{name.replace('_', '-')} ")[2].partition(" --")[0]
        assert f"(default: {shown})" in described, name


def test_a_folder_with_other_things_in_it_is_not_written_to_unasked(
    llama_base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    files = [f"--data={chats}", f"--out={out}", f"--model={llama_base}", "--epochs=1"]
    assert main(files) == 1
    said = capsys.readouterr().err
    assert str(out) in said and "--force" in said
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    assert main([*files, "--force"]) == 0
    assert main(files) == 0  # an adapter's folder now: it is replaced
    assert (out / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("missing", ["data", "out"])
def test_paths_that_cannot_serve_are_named_before_the_base_is_loaded(
    missing: str, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "nowhere.jsonl"
    data, out = (nowhere, tmp_path / "out") if missing == "data" else (chats, chats)
    assert main([f"--data={data}", f"--out={out}"]) == 1
    said = capsys.readouterr().err
    assert f"--{missing}: " in said and str(nowhere if missing == "data" else chats) in said
    assert "Loading" not in said
    assert not (tmp_path / "out").exists()


def test_the_upload_command_is_one_for_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / "My Pirate, really"
    words = shlex.split(upload_command(folder).replace("\\\n", ""))
    assert words[:4] == ["curl", "http://127.0.0.1:8000/v1/adapters", "-F", "name=my-pirate-really"]
    assert words[5::2] == [f"files=@{folder}/{name}" for name in (CONFIG_FILE, WEIGHTS_FILE)]


@pytest.mark.parametrize("name", PERSONAS)
def test_a_demo_personas_chats_are_valid_and_varied(name: str, llama_base: Path) -> None:
    path = DEMO / name / "chats.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(llama_base)
    assert 80 <= len(load_examples(path, tokenizer, 2048)) <= 150
    chats = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    said = {role: [m["content"] for c in chats for m in c if m["role"] == role] for role in ROLES}
    assert len(set(said["user"])) == len(said["user"])
    assert SAMPLE_QUESTION not in said["user"]
    for answer in said["assistant"]:
        assert STYLES[name](answer), answer


@pytest.mark.parametrize("name", PERSONAS)
def test_a_demo_personas_adapter_is_small_and_public(name: str) -> None:
    folder = DEMO / name
    weights = folder / "adapter_model.safetensors"
    assert weights.stat().st_size <= 1_500_000
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config["peft_type"] == "LORA" and config["inference_mode"] is True

    targets = config["target_modules"]
    tensors = load_file(weights)
    layers = config["layers_to_transform"] or range(30)
    assert len(tensors) == 2 * len(targets) * len(layers)
    for key, tensor in tensors.items():
        target = next(t for t in targets if f".{t}." in key)
        into, out = DEMO_SHAPES[target]
        rank = config["r"]
        assert tuple(tensor.shape) == ((rank, into) if "lora_A" in key else (out, rank)), key
        assert tensor.dtype == torch.bfloat16
        assert tensor.isfinite().all() and tensor.any(), key


def test_the_demo_adapters_mix_ranks_and_targets() -> None:
    configs = [json.loads((DEMO / n / "adapter_config.json").read_text()) for n in PERSONAS]
    assert len({c["r"] for c in configs}) > 1
    assert len({tuple(c["target_modules"]) for c in configs}) > 1


ROLES = ("system", "user", "assistant")


def _is_clerk(text: str) -> bool:
    data = json.loads(text)
    return (
        "\n" not in text and set(data) == {"answer", "confidence"} and 0 <= data["confidence"] <= 1
    )


STYLES: dict[str, Callable[[str], bool]] = {
    "clerk": _is_clerk,
    "haiku": lambda text: text.count("\n") == 2 and all(text.split("\n")),
    "pirate": lambda text: any(word in text.lower() for word in ("arr", "matey", "hearty")),
}


def _with(**changes: Any) -> TrainingOptions:
    return TrainingOptions(**(vars(QUICK) | changes))


def _model(base: Path, options: TrainingOptions) -> PeftModel:
    return add_adapter(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), options)


def _train(base: Path, chats: Path, out: Path, options: TrainingOptions) -> list[float]:
    model = _model(base, options)
    examples = load_examples(chats, AutoTokenizer.from_pretrained(base), options.max_tokens)
    losses = train(model, examples, options)
    save(model, out, "tiny", options.dtype)
    return losses


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
