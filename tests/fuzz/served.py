"""Adapters served by a real engine, in a mixed batch, and judged by PEFT."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from peft.utils import load_peft_weights
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapters.errors import AdapterRejected, Violation
from adapters.foreign import convert
from adapters.manifest import WEIGHTS_FILE, AdapterRef
from adapters.validation import Limits, validate
from base_engine.engine import Engine
from base_engine.request import GenerateRequest, TokenEvent
from base_engine.sampler import LogitsNotFinite
from tests.features import INVOCATION
from tests.generation import request, running_engine
from tests.tiny import FAMILIES, PROJECTIONS, byte_ids, make_adapter

#: Largest difference of a log-probability that counts as equal, in float32.
TOLERANCE = 1e-4

#: Tokens generated after the prompt whose every position is looked at.
_TOKENS = 3
_TOP = 20
_PROMPT = (*byte_ids("A parrot, "), *INVOCATION, 75, 5, 7, 3, 90)
_LONGER = (*byte_ids("Something else that is longer, "), *INVOCATION, 40)


@dataclass
class Stand:
    """An engine on the base in `base`; `other` is an adapter that is in every batch."""

    base: Path
    engine: Engine
    other: AdapterRef
    _company: list[Tensor] = field(default_factory=list)
    _model: Any = None

    def accept(self, folder: Path) -> AdapterRef:
        """The adapter in `folder`, checked and tried out as an upload. Raises AdapterRejected."""
        convert(folder, self.engine.base)
        ref = _ref(self.engine, folder)
        try:
            asyncio.run(self.engine.effect(ref))
        except LogitsNotFinite:
            self.engine.forget(ref.digest)
            violation = Violation("output_not_finite", WEIGHTS_FILE, "is not finite")
            raise AdapterRejected([violation]) from None
        return ref

    def difference(self, ref: AdapterRef, adapter: Path) -> float:
        """The largest difference of a log-probability to what PEFT loads from `adapter`, at all
        positions of a prompt and of an answer, beside base rows and another adapter.

        Differences are told in units of what may be: TOLERANCE, or, where PEFT's own rounding is
        as large, 4 times that. Raises what PEFT raises for files that it cannot load.
        """
        vocab = ref.manifest.vocab_size
        model = self.peft(adapter, vocab)
        own = [(*prompt, vocab - 1) if vocab else prompt for prompt in (_PROMPT, _LONGER)]
        asked = [
            request(_LONGER, None, 1, logits=True),
            request(own[0], ref, 1, logits=True),
            request(_PROMPT, self.other, 1, logits=True),
            request(own[1], ref, _TOKENS, logprobs=_TOP),
        ]
        got = asyncio.run(_answers(self.engine, asked))
        self._check_company([_logits(got[0]), _logits(got[2])])
        found = _logits(got[1]).log_softmax(-1)
        tokens = [event.token_id for event in got[3] if event.token_id is not None]
        inputs = [own[0], (*own[1], *tokens)]
        want = [_logprobs(model, ids) for ids in inputs]
        assert found.shape == want[0].shape and len(tokens) == _TOKENS
        answer = want[1][len(own[1]) - 1 : -1]
        largest = max(float((found - want[0]).abs().max()), _of_answer(answer, got[3]))
        if largest < TOLERANCE:
            return largest / TOLERANCE
        model.double()
        exact = (_logprobs(model, ids) for ids in inputs)
        rounding = max(float((a - b).abs().max()) for a, b in zip(want, exact, strict=True))
        return largest / max(TOLERANCE, 4 * rounding)

    def peft(self, adapter: Path, vocab_size: int = 0) -> Any:
        """PEFT's model, float32, of the adapter in a folder."""
        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(
                self.base, dtype=torch.float32, attn_implementation="eager"
            )
        model = copy.deepcopy(self._model)
        if vocab_size:
            model.resize_token_embeddings(vocab_size, mean_resizing=False)
        return PeftModel.from_pretrained(model, str(adapter)).eval()

    def left_out(self, adapter: Path) -> tuple[set[str], set[str]]:
        """What PEFT misses in `adapter`, and the tensors that it does not take from it, of which
        it warns at most. Raises what PEFT raises for files that it cannot load."""
        tensors = load_peft_weights(str(adapter))
        result: Any = set_peft_model_state_dict(self.peft(adapter), dict(tensors))
        missing = {name for name in result.missing_keys if "lora_" in name}
        ignored = {name.removesuffix(".weight") for name in result.unexpected_keys}
        return missing, {name for name in tensors if name.removesuffix(".weight") in ignored}

    def _check_company(self, logits: list[Tensor]) -> None:
        """The other rows are what they were in the first batch, whatever runs beside them."""
        self._company = self._company or logits
        vocab = self.engine.base.vocab_size
        for first, now in zip(self._company, logits, strict=True):
            assert bool((now[:, vocab:] == -torch.inf).all()), "it may use ids of another adapter"
            worst = float((first[:, :vocab] - now[:, :vocab]).abs().max())
            assert worst < TOLERANCE, f"another row of the batch changed by {worst}"


@contextmanager
def stand(base: Path, family: str) -> Iterator[Stand]:
    with running_engine(base, adapter_bytes=32 << 20, host_adapter_bytes=32 << 20) as engine:
        name = PROJECTIONS.get(FAMILIES[family][0], ("q_proj",))[0]
        folder = make_adapter(base, base / "other", seed=77, r=3, target_modules=[name])
        yield Stand(base, engine, _ref(engine, folder))


def _ref(engine: Engine, folder: Path) -> AdapterRef:
    manifest = validate(folder, engine.base, Limits(), parameters=engine.decoder.parameter)
    return AdapterRef(manifest.digest, folder.name, folder, manifest)


async def _answers(engine: Engine, asked: Sequence[GenerateRequest]) -> list[list[TokenEvent]]:
    async def events(request: GenerateRequest) -> list[TokenEvent]:
        found = [event async for event in engine.submit(request)]
        assert found[-1].error is None, found[-1].error
        return found

    return await asyncio.wait_for(asyncio.gather(*map(events, asked)), 60)


def _logits(events: list[TokenEvent]) -> Tensor:
    (logits,) = (event.logits for event in events if event.logits is not None)
    return logits


def _of_answer(want: Tensor, events: list[TokenEvent]) -> float:
    """The largest difference to the rows of `want`; counts half of what a greedy token was less
    likely than the most likely one."""
    largest = 0.0
    for row, event in zip(want, events, strict=False):
        assert event.logprobs is not None and event.token_id is not None
        pairs = [(event.token_id, event.logprobs.chosen), *event.logprobs.top]
        ids, values = (torch.tensor(column) for column in zip(*pairs, strict=True))
        short = float(row.max() - row[event.token_id]) / 2
        largest = max(largest, short, float((row[ids] - values).abs().max()))
    return largest


@torch.no_grad()
def _logprobs(model: Any, ids: Sequence[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.log_softmax(-1)
