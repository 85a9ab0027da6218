"""The engine's settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and bounds of one engine. Byte values are plain bytes.

    `step_tokens` bounds the tokens of one forward pass, prefill chunks and decodes together.
    `patience` is how many later requests may be admitted past one that waits for room; then
    nothing passes it any more. `prefix_cache` reuses KV pages of equal prompts of one tenant and
    one adapter.
    """

    device: str = "cpu"
    dtype: str = "float32"
    kv_bytes: int = 1 << 30
    adapter_bytes: int = 512 << 20
    host_adapter_bytes: int = 1 << 30
    block_size: int = 16
    step_tokens: int = 256
    max_running: int = 32
    max_waiting: int = 256
    patience: int = 64
    loader_threads: int = 2
    prefix_cache: bool = True
    steps_kept: int = 1000
