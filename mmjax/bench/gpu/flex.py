"""PyTorch's FlexAttention for the cases of section ``attention``: values, seconds forward and of both passes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # pyright: ignore[reportMissingImports]

from mmjax.bench.gpu.attention import Case


def measure(case: Case) -> dict[str, Any]:
    """Figures of one case: "forward_seconds", "forward_tflops" and, on a GPU, "both_seconds" and "both_tflops".

    And "gap", the relative difference from exact values, for rows of up to 2048 tokens. The block mask is computed
    once, before the timed calls.
    """
    rows, length, groups = case.rows, case.length, case.groups or case.heads
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device="cpu").manual_seed(0)

    def drawn(heads: int) -> Any:
        return torch.randn(rows, heads, length, case.width, generator=generator).to(device, torch.bfloat16)

    q, k, v, cotangent = (drawn(heads) for heads in (case.heads, groups, groups, case.heads))
    inputs = [x.requires_grad_(device == "cuda") for x in (q, k, v)]  # on a CPU it has no backward
    segments = torch.arange(length, device=device) * case.segments // length

    def allowed_pairs(row: Any, head: Any, query: Any, key: Any) -> Any:
        allowed = segments[query] == segments[key]
        if case.kind == "causal":
            allowed = allowed & (key <= query)
        return allowed & (query - key < case.window) if case.window else allowed

    mask = create_block_mask(allowed_pairs, B=None, H=None, Q_LEN=length, KV_LEN=length, device=device)
    compiled = torch.compile(flex_attention) if device == "cuda" else flex_attention

    def forward() -> Any:
        return compiled(*inputs, block_mask=mask, enable_gqa=groups != case.heads)

    def both() -> Any:
        return torch.autograd.grad(forward(), inputs, cotangent)

    index = torch.arange(length, device=device)
    figures = {"gap": _gap(forward(), allowed_pairs(0, 0, index[:, None], index), *inputs)} if length <= 2048 else {}
    figures["forward_seconds"] = forward_seconds = _seconds(forward)
    figures["forward_tflops"] = case.flops / forward_seconds / 1e12
    if device == "cuda":
        figures["both_seconds"] = both_seconds = _seconds(both)
        figures["both_tflops"] = 3 * case.flops / both_seconds / 1e12
    return figures


def _gap(out: Any, allowed: Any, q: Any, k: Any, v: Any) -> float:
    """Relative difference from attention of all pairs in fp32."""
    with torch.no_grad():
        k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        exact = F.scaled_dot_product_attention(q.float(), k, v, attn_mask=allowed)
        return float((out.float() - exact).norm() / exact.norm())


def _seconds(run: Callable[[], Any]) -> float:
    """Median seconds of a call; the first ones, which may compile, do not count."""
    times: list[float] = []
    for _ in range(13):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])
