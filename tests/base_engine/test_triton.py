"""The Triton kernels: their numbers under Triton's interpreter, and that they compile for GPUs.

Triton reads TRITON_INTERPRET as it is imported, so each side runs in a process of its own. The
interpreter takes milliseconds per program: shapes are small, and just past the block sizes.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from adapters.manifest import PAGE_RANK
from base_engine.kernels.segments import Segments
from tests.base_engine.workload import Layout, lengths_to_runs, one_target

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

#: (rows, rank) of adjacent runs; rank 0 is the base.
Parts = list[tuple[int, int]]
TOLERANCE = {"float32": (2e-5, 1e-5), "bfloat16": (2e-2, 8e-3), "float16": (2e-3, 1e-3)}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            yield pool


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            yield pool


def error(parts: Parts, inner: int, outer: int, dtype: str, x_dtype: str) -> str:
    """Runs a batch on both layers of a target; empty if all rows agree, else what differs."""
    from base_engine.kernels.triton_sgmv import add_lora_triton

    layout = Layout(one_target(inner, outer, layers=2), getattr(torch, dtype), slots=32)
    runs = lengths_to_runs(
        [
            (rows, layout.add([rank, max(rank - 7, 0)], [0.5, -2.0]) if rank else None)
            for rows, rank in parts
        ]
    )
    target = Segments.build(runs, layout.base, "cpu").targets[0][0]
    atol, rtol = TOLERANCE[x_dtype]
    for layer in range(2):
        x, y = (layout.randn(runs[-1].end, n).to(getattr(torch, x_dtype)) for n in (inner, outer))
        before, again = y.clone(), y.clone()
        expected = y.double() + layout.delta(runs, x, 0, layer)
        add_lora_triton(y, x, layout.buffer, target, layer)
        add_lora_triton(again, x, layout.buffer, target, layer)
        if not torch.equal(y, again):
            return "two runs differ"
        if not torch.allclose(y.double(), expected, atol=atol, rtol=rtol):
            return f"layer {layer}: off by {(y.double() - expected).abs().max()}"
        for run in runs:
            if not run.adapters and not torch.equal(
                y[run.start : run.end], before[run.start : run.end]
            ):
                return f"base rows [{run.start}, {run.end}) changed"
    return ""


@pytest.mark.parametrize(
    ("parts", "inner", "outer"),
    [
        pytest.param([(1, 0), (1, 3), (1, 8), (2, 0), (1, 17), (3, 1)], 40, 24, id="decode"),
        pytest.param([(1, r) for r in (2, 5, 7, 16, 31, 32, 48, 64)], 24, 16, id="ranks"),
        pytest.param([(1, 5)], 72, 72, id="one row, two blocks each way"),
        pytest.param([(1, 9), (1, 4)], 520, 16, id="two splits, the last one ragged"),
        pytest.param([(17, 9), (1, 2), (2, 0), (65, 4)], 24, 24, id="prefill beside decode"),
    ],
)
def test_interpreted_numbers(
    interpreter: ProcessPoolExecutor, parts: Parts, inner: int, outer: int
) -> None:
    assert not interpreter.submit(error, parts, inner, outer, "float32", "float32").result()


@pytest.mark.parametrize(
    ("dtype", "x_dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
    ],
)
def test_interpreted_dtypes(interpreter: ProcessPoolExecutor, dtype: str, x_dtype: str) -> None:
    parts = [(1, 3), (1, 0), (2, 17)]
    assert not interpreter.submit(error, parts, 40, 24, dtype, x_dtype).result()


def resources(capability: int, dtype: str, block_rows: int) -> dict[str, tuple[int, int, int]]:
    """Kernel -> registers a thread, bytes spilled to the stack, bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from base_engine.kernels import triton_sgmv as kernels

    sizes: dict[str, int | str] = {
        "layers": 32,
        "in_features": 4096,
        "rank_width": 64,
        "PAGE": PAGE_RANK,
    }
    sizes |= {"PRECISION": "ieee" if dtype == "fp32" else "tf32"}
    blocks = {"BLOCK_M": block_rows, "BLOCK_R": kernels.BLOCK_RANK}
    shrink = sizes | blocks | {"SPLIT": kernels.SPLIT_IN, "BLOCK_K": kernels.BLOCK_IN}
    expand = sizes | blocks | {"out_features": 14336, "SPLITS": 8, "BLOCK_N": kernels.BLOCK_OUT}
    pointers = {
        "partial": "*fp32", "scales": "*fp32", "pages": "*i64", "tiles": "*i32", "ranks": "*i32"
    } | dict.fromkeys(("x", "y", "buffer"), f"*{dtype}")  # fmt: skip
    found = {}
    for kernel, constants in ((kernels._shrink, shrink), (kernels._expand, expand)):
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
        # A launch finds out by itself that a pointer or stride is a multiple of 16.
        sixteens = {*pointers, "rank_width", "x_stride", "y_stride"}
        attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in sixteens}
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, attributes),
            target=GPUTarget("cuda", capability, 32),
            options={"enable_fp_fusion": True},
        )
        cubin = Path(next(p for n, p in compiled.metadata_group.items() if n.endswith(".cubin")))
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run(
            [tool, "--dump-resource-usage", cubin], check=True, capture_output=True, text=True
        ).stdout
        (usage,) = re.findall(r"REG:(\d+) STACK:(\d+)", report)
        registers, stack = map(int, usage)
        found[kernel.__name__] = (registers, stack, compiled.metadata.shared)
    return found


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dtype", "block_rows"), [("bf16", 16), ("bf16", 64), ("fp32", 64)])
def test_compiles_within_the_registers_and_shared_memory_of_a_gpu(
    compiler: ProcessPoolExecutor, capability: int, dtype: str, block_rows: int
) -> None:
    used = compiler.submit(resources, capability, dtype, block_rows).result()
    assert set(used) == {"_shrink", "_expand"}
    for kernel, (registers, stack, shared) in used.items():
        print(
            f"sm_{capability} {dtype} {block_rows} rows {kernel}: {registers} registers, {shared} B"
        )
        assert registers <= 255 and stack == 0, f"{kernel} spills: {used}"
        assert shared <= 99 << 10, f"{kernel} leaves no room on the smaller sm_8x chips: {used}"
