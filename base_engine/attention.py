"""Attention over paged keys and values, plugged into transformers' attention interface."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from base_engine.sequence import Chunk

#: The name under which transformers finds `paged_attention`.
ATTENTION = "lorikeet_paged"

#: The keyword of the model call that carries a step's attention down to every layer.
STEP = "lorikeet_step"

#: What some architectures hand to their attention that this one does not compute.
_UNSUPPORTED = ("s_aux", "position_bias", "head_mask", "indexer")


class UnsupportedAttention(Exception):
    """The model asks for a kind of attention that would not be computed exactly."""


class KVShape(NamedTuple):
    """Sizes of one layer's keys and values."""

    heads: int
    key_dim: int
    value_dim: int


class AttentionProbe:
    """Takes part in one trial forward to learn each attention layer's sizes."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        if layer in self.shapes:
            raise UnsupportedAttention(f"two attention layers share the index {layer}")
        self.shapes[layer] = KVShape(k.shape[1], k.shape[3], v.shape[3])
        return v.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


class KVCache:
    """Keys and values of every layer, [heads, slots, dim].

    Block b holds the slots from b·block_size; a token's slot is the same in all layers.
    """

    def __init__(
        self,
        shapes: dict[int, KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        slots = num_blocks * block_size
        self.keys = {
            layer: torch.zeros(shape.heads, slots, shape.key_dim, dtype=dtype, device=device)
            for layer, shape in shapes.items()
        }
        self.values = {
            layer: torch.zeros(shape.heads, slots, shape.value_dim, dtype=dtype, device=device)
            for layer, shape in shapes.items()
        }


def block_bytes(shapes: dict[int, KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in all layers together."""
    width = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes.values())
    return width * block_size * dtype.itemsize


class _Group(NamedTuple):
    """Sequences that attend together: the step rows of their queries and the slots they see.

    rows [sequences, queries], slots [sequences, context], positions of the queries and of the
    slots likewise; `position_of_slot` is -1 where a shorter sequence is padded (with a slot of
    its own, so that nobody ever multiplies, even by zero, what belongs to another).
    """

    rows: Tensor
    slots: Tensor
    position_of_row: Tensor
    position_of_slot: Tensor


class StepAttention:
    """One step's paged attention. Everything that layers share is worked out here, once."""

    def __init__(self, cache: KVCache, chunks: Seq[Chunk]) -> None:
        self.cache = cache
        device = next(iter(cache.keys.values())).device
        sequences: dict[tuple[int, ...], list[tuple[int, Chunk, Tensor]]] = {}
        new_slots = []
        row = 0
        for chunk in chunks:
            end = chunk.start + chunk.count
            blocks = torch.tensor(chunk.sequence.blocks, dtype=torch.int64)
            offsets = torch.arange(cache.block_size)
            slots = (blocks[:, None] * cache.block_size + offsets).view(-1)[:end]
            new_slots.append(slots[chunk.start :])
            # Single tokens attend together with others of about the same context length.
            key = (1, end.bit_length()) if chunk.count == 1 else (chunk.count, -row)
            sequences.setdefault(key, []).append((row, chunk, slots))
            row += chunk.count
        self.new_slots = torch.cat(new_slots).to(device)
        self.groups = [_group(members, device) for members in sequences.values()]
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Store k and v, and attend with q over all stored tokens of each row's own sequence.

        q [1, heads, T, dim], k and v [1, kv heads, T, dim] → [1, T, heads, value dim].
        """
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.index_copy_(1, self.new_slots, k[0])
        values.index_copy_(1, self.new_slots, v[0])
        heads, tokens, kv_heads = q.shape[1], q.shape[2], k.shape[1]
        out = q.new_empty(tokens, heads, v.shape[3])
        for index, group in enumerate(self.groups):
            count, queries = group.rows.shape
            # [kv heads, sequences, queries per kv head, dim]
            grouped = (
                q[0]
                .index_select(1, group.rows.view(-1))
                .view(kv_heads, heads // kv_heads, count, queries, -1)
                .transpose(1, 2)
                .reshape(kv_heads, count, -1, q.shape[3])
            )
            flat = group.slots.view(-1)
            context_k = keys.index_select(1, flat).view(kv_heads, count, -1, keys.shape[2])
            context_v = values.index_select(1, flat).view(kv_heads, count, -1, values.shape[2])
            scores = (grouped @ context_k.transpose(2, 3)).float() * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores = scores.view(kv_heads, count, heads // kv_heads, queries, -1)
            scores += self._mask(index, window)
            weights = scores.softmax(-1).to(v.dtype).view(kv_heads, count, -1, scores.shape[-1])
            result = (weights @ context_v).view(kv_heads, count, heads // kv_heads, queries, -1)
            rows = result.permute(1, 3, 0, 2, 4).reshape(count * queries, heads, -1)
            out.index_copy_(0, group.rows.view(-1), rows)
        return out[None]

    def _mask(self, index: int, window: int | None) -> Tensor:
        """Additive fp32 mask [sequences, 1, queries, context] of group `index`."""
        key = (index, window)
        if key not in self._masks:
            group = self.groups[index]
            distance = group.position_of_row[:, :, None] - group.position_of_slot[:, None, :]
            visible = (distance >= 0) & (group.position_of_slot[:, None, :] >= 0)
            if window is not None:
                visible &= distance < window
            mask = torch.zeros(visible.shape, device=visible.device)
            self._masks[key] = mask.masked_fill_(~visible, -torch.inf)[:, None]
        return self._masks[key]


def _group(members: list[tuple[int, Chunk, Tensor]], device: torch.device) -> _Group:
    longest = max(len(slots) for _, _, slots in members)
    rows, all_slots, row_positions, slot_positions = [], [], [], []
    for row, chunk, slots in members:
        padding = longest - len(slots)
        rows.append(torch.arange(row, row + chunk.count))
        row_positions.append(torch.arange(chunk.start, chunk.start + chunk.count))
        all_slots.append(torch.cat([slots, slots[:1].expand(padding)]))
        position = torch.arange(longest)
        position[len(slots) :] = -1
        slot_positions.append(position)
    return _Group(
        torch.stack(rows).to(device),
        torch.stack(all_slots).to(device),
        torch.stack(row_positions).to(device),
        torch.stack(slot_positions).to(device),
    )


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' models call; hands over to the step's attention.

    Raises UnsupportedAttention where the model asks for more than causal attention with an
    optional window and soft cap.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedAttention(f"the model's attention uses {name}")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedAttention("the model's attention is not causal")
    step: StepAttention | AttentionProbe = kwargs[STEP]
    out = step.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out, None


AttentionInterface.register(ATTENTION, paged_attention)
# Masks are built per step by StepAttention, so the models need not build theirs.
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
