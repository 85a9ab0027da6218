"""The forward pass of one step, from chunks to sampled tokens."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch

from adapters.pool import AdapterPool
from base_engine.attention import KVCache, block_bytes
from base_engine.batch import build_batch
from base_engine.config import EngineConfig
from base_engine.model import Decoder
from base_engine.sampler import Sampled, SampleRow, sample
from base_engine.sequence import Chunk
from base_engine.terms import StepTerms


class Ran(NamedTuple):
    """A finished step: the chunks in row order, and a draw for each chunk that samples."""

    chunks: list[Chunk]
    sampled: list[Sampled]


class Runner:
    """Owns the device memory of a decoder's KV cache and runs steps through it."""

    def __init__(self, decoder: Decoder, adapters: AdapterPool, config: EngineConfig) -> None:
        self.decoder = decoder
        self.adapters = adapters
        size = block_bytes(decoder.kv_shapes, config.block_size, decoder.dtype)
        num_blocks = config.kv_bytes // size
        if num_blocks < 1:
            raise ValueError(
                f"kv_bytes is {config.kv_bytes}, but one block of {config.block_size} tokens "
                f"takes {size} bytes"
            )
        self.cache = KVCache(
            decoder.kv_shapes, num_blocks, config.block_size, decoder.dtype, decoder.device
        )

    def run(self, chunks: list[Chunk]) -> Ran:
        """One forward pass over `chunks`. Rows with unusable logits carry their own error."""
        decoder = self.decoder
        batch = build_batch(chunks, decoder.spec, self.cache, decoder.device)
        binding = decoder.binding
        binding.buffer, binding.rows, binding.head = self.adapters.buffer, batch.rows, batch.head
        terms = StepTerms.build(batch.runs, batch.head_runs, decoder.spec)
        with nullcontext() if terms is None else terms.attached(decoder):
            logits = decoder.forward(
                batch.input_ids, batch.positions, batch.logit_rows, batch.attention
            )
        rows = [
            SampleRow(chunk.sequence.request.sampling, chunk.sequence.random)
            for chunk in batch.sampling
        ]
        with torch.inference_mode():
            if terms is not None:
                terms.hide_foreign_tokens(logits)
            return Ran(batch.chunks, sample(logits, rows))
