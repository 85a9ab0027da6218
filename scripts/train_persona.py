"""Train a LoRA adapter on chats, one JSON object a line:

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy!"}]}

Roles are system, user and assistant; the assistant has the last word. Only what it says carries
loss. The base stays in float32 and unchanged. What is saved is standard PEFT, adapter_config.json
and adapter_model.safetensors, ready to be uploaded.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from scripts.chats import NO_LOSS, ChatsError, Example, load_examples, render
from scripts.demo_model import DemoModelError, ensure_demo_model
from scripts.train_options import DEMO_BASE, DTYPES, TrainingOptions, parse_options

#: Asked before and after the training; in none of the demo data.
SAMPLE_QUESTION = "What should I cook tonight?"


#: Seconds between lines of progress where no bar can be drawn.
_LINE_S = 10


class TrainingError(Exception):
    """The base or an option cannot be trained with; the message says which and why."""


def add_adapter(base: Any, options: TrainingOptions) -> PeftModel:
    """Put a fresh LoRA on `base`, seeded. Raises TrainingError for a target or layer it lacks."""
    depth = base.config.get_text_config().num_hidden_layers
    if outside := [n for n in options.layers or () if not 0 <= n < depth]:
        raise TrainingError(f"--layers: {outside[0]} is not in 0-{depth - 1}")
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=_target_names(base, options.targets),
        layers_to_transform=None if options.layers is None else [*options.layers],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(options.seed)
    with warnings.catch_warnings():
        # peft 0.21 asks a transformers 5.24 model for the property's old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        model = get_peft_model(base, config)
    assert isinstance(model, PeftModel)
    return model


def train(
    model: PeftModel,
    examples: Sequence[Example],
    options: TrainingOptions,
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> list[float]:
    """Train the adapter in place and round it to the dtype it is saved in; return each step's loss.

    AdamW, one tenth of the steps warm-up, then cosine decay. `on_step` gets the steps done, all
    steps, and the last step's loss. The same seed on the same threads gives the same adapter.
    Raises TrainingError where the loss stops being a number.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    batches = list(_batches(examples, options))
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _lr_factor(len(batches)))
    losses = []
    model.train()
    for step, (ids, mask, labels) in enumerate(batches, start=1):
        # The head is a good part of a small model: no logits before the first token with loss.
        first = max(0, int((labels != NO_LOSS).any(0).nonzero()[0]) - 1)
        loss = model(
            input_ids=ids,
            attention_mask=mask,
            labels=labels[:, first:],
            logits_to_keep=ids.shape[1] - first,
            use_cache=False,
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise TrainingError(f"the loss is {losses[-1]} in step {step}: lower --lr {options.lr}")
        on_step(step, len(batches), losses[-1])
    model.eval()
    for parameter in trained:
        parameter.data = parameter.data.to(DTYPES[options.dtype]).to(parameter.dtype)
    return losses


def save(model: PeftModel, folder: Path, base_name: str, dtype: str) -> int:
    """Write the two PEFT files into `folder`; return the size of the weights in bytes."""
    config = model.peft_config["default"]
    assert isinstance(config, LoraConfig)
    config.inference_mode = True
    config.base_model_name_or_path = base_name
    # peft holds the names as a set, whose order differs from run to run.
    config.target_modules = sorted(config.target_modules or ())
    config.save_pretrained(str(folder))
    # No embeddings are trained; to find that out by itself peft would ask the network.
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = {k: v.detach().to(DTYPES[dtype]).contiguous() for k, v in tensors.items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return (folder / WEIGHTS_FILE).stat().st_size


@torch.inference_mode()
def answer(model: Any, tokenizer: PreTrainedTokenizerBase, question: str, limit: int = 40) -> str:
    """The greedy answer to one question, at most `limit` tokens."""
    messages = [{"role": "user", "content": question}]
    prompt = render(tokenizer, messages, add_generation_prompt=True)
    encoded = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    output = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=limit,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    new_ids = output[0, encoded["input_ids"].shape[1] :]
    return str(tokenizer.decode(new_ids, skip_special_tokens=True)).strip()


def main(argv: Sequence[str] | None = None) -> int:
    args, options = parse_options(argv, __doc__)
    console = Console(stderr=True)
    try:
        check_paths(args.data, args.out, args.force)
        _run(args.data, args.out, args.model, options, console)
    except (ChatsError, TrainingError, DemoModelError, OSError) as e:
        console.print(f"error: {e}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def check_paths(data: Path, out: Path, force: bool) -> None:
    """Refuse what would only fail, or do harm, after the training. Makes `out`.

    An adapter that lies there is replaced. Raises TrainingError, OSError.
    """
    if not data.is_file():
        raise TrainingError(f"--data: there is no file {data}")
    if out.exists() and not out.is_dir():
        raise TrainingError(f"--out: {out} is a file, not a folder")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()) and not (out / CONFIG_FILE).is_file() and not force:
        raise TrainingError(
            f"--out: {out} has other things than an adapter in it; name another folder, "
            "or add the adapter to it with --force"
        )


def _run(
    data: Path, out: Path, model_name: str | None, options: TrainingOptions, console: Console
) -> None:
    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    transformers_logging.disable_progress_bar()
    say(f"Loading {model_name or DEMO_BASE} …")
    source = model_name or str(ensure_demo_model(say))
    tokenizer = AutoTokenizer.from_pretrained(source)
    examples = load_examples(data, tokenizer, options.max_tokens)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    say("Asking the base a question, to compare …")
    before = answer(base, tokenizer, SAMPLE_QUESTION)
    model = add_adapter(base, options)
    say(f"Training on {len(examples)} chats, {options.epochs} times each …")
    with _progress(console) as on_step:
        losses = train(model, examples, options, on_step)
    size = save(model, out, _base_name(model_name), options.dtype)
    say("Asking the adapter …")
    tail = losses[-max(1, len(losses) // options.epochs) :]
    for line in (
        f"question      {SAMPLE_QUESTION}",
        f"base          {before}",
        f"adapter       {answer(model, tokenizer, SAMPLE_QUESTION)}",
        f"loss          {losses[0]:.3f} -> {sum(tail) / len(tail):.3f} (last epoch's mean)",
        f"{WEIGHTS_FILE}  {size / 1e6:.2f} MB in {out}",
        "",
        "Upload it to a server of the same base:",
        upload_command(out),
    ):
        say(line)


def upload_command(folder: Path) -> str:
    """A line for the shell that uploads the adapter under its folder's name."""
    name = re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).lstrip("._-")[:64]
    files = (shlex.quote(f"files=@{folder / file}") for file in (CONFIG_FILE, WEIGHTS_FILE))
    return f"curl http://127.0.0.1:8000/v1/adapters -F name={name or 'mine'} \\\n" + " \\\n".join(
        f"  -F {file}" for file in files
    )


def _batches(
    examples: Sequence[Example], options: TrainingOptions
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids, mask and labels, int64 [batch, longest], right-padded, in a seeded order.

    Chats of like length share a batch, so that little of it is padding.
    """
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.epochs):
        shuffled = torch.randperm(len(examples), generator=generator).tolist()
        by_length = sorted(shuffled, key=lambda i: len(examples[i].ids))
        starts = range(0, len(examples), options.batch)
        for n in torch.randperm(len(starts), generator=generator).tolist():
            batch = [examples[i] for i in by_length[starts[n] : starts[n] + options.batch]]
            yield (
                pad_sequence([torch.tensor(e.ids) for e in batch], True),
                pad_sequence([torch.ones(len(e.ids), dtype=torch.int64) for e in batch], True),
                pad_sequence([torch.tensor(e.labels) for e in batch], True, NO_LOSS),
            )


def _lr_factor(steps: int) -> Callable[[int], float]:
    warmup = max(1, steps // 10)
    return lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def _target_names(base: Any, wanted: tuple[str, ...]) -> list[str]:
    """Last parts of the names of the linear layers to adapt; the head is never among them."""
    head = base.get_output_embeddings()
    names = {
        path.rpartition(".")[2]
        for path, module in base.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    if wanted == ("all-linear",):
        return sorted(names)
    if unknown := set(wanted) - names:
        raise TrainingError(
            f"--targets: no linear layer is named {', '.join(sorted(unknown))}; "
            f"this base has {', '.join(sorted(names))}"
        )
    return sorted(set(wanted))


def _base_name(model: str | None) -> str:
    """A public name for the config: a local path would mean nothing to others."""
    if model is None:
        return DEMO_BASE
    return Path(model).resolve().name if Path(model).exists() else model


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int, float], None]]:
    """Shows steps: a bar on a terminal, elsewhere a line every few seconds."""
    if not console.is_terminal:
        yield _lines(console)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        console=console,
    )
    with bar:
        task = bar.add_task("training", total=None, loss=float("nan"))
        yield lambda step, steps, loss: bar.update(task, completed=step, total=steps, loss=loss)


def _lines(console: Console) -> Callable[[int, int, float], None]:
    started = said = time.monotonic()

    def on_step(step: int, steps: int, loss: float) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said < _LINE_S and 1 < step < steps:
            return
        said = now
        left = (now - started) / step * (steps - step)
        line = f"step {step}/{steps}, loss {loss:.3f}, about {left:.0f} s left"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return on_step


if __name__ == "__main__":
    sys.exit(main())
