"""The models' layers beside the same layers in PyTorch: the same weights, shapes and precision, forward and backward.

First values in fp32, at a size that a CPU computes too: times mean something only if both compute the same. Then times
in bf16. PyTorch's attention is ``scaled_dot_product_attention`` (its fused kernels), with and without
``torch.compile``. Every row is one segment, so that both sides need no mask but the causal one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from jax.sharding import PartitionSpec

from mmjax.attention.backends import Backend
from mmjax.bench.gpu import attention
from mmjax.bench.gpu.job import Job, failure
from mmjax.bench.gpu.parity import matmul_precision
from mmjax.bench.gpu.timing import apart, seconds
from mmjax.mesh.layout import Layout
from mmjax.mesh.spmd import Spmd
from mmjax.mesh.world import World
from mmjax.models.context import Context
from mmjax.models.families import module_of
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.module import run_layers
from mmjax.models.vit.config import ViTConfig
from mmjax.pipeline.trees import nested

Leaves = dict[str, Any]
"""Stacked weights by path, such as "attn/q"."""
LIMIT = 1e-5
"""Limit on relative differences of fp32 outputs and gradients."""
EPS = 1e-6
"""Epsilon of an encoder's LayerNorm."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Layers of one kind, and the size of their input.

    Attributes:
      name: the case in words.
      config: their settings, a ``DecoderConfig`` or a ``ViTConfig``.
      rows: rows of the input.
      length: positions of a row.
    """

    name: str
    config: Any
    rows: int
    length: int

    @property
    def causal(self) -> bool:
        """Whether the layers are an LLM's."""
        return isinstance(self.config, DecoderConfig)


CASES = (
    Case(
        name="4 layers of Vicuna-7B, 2x2048",
        config=DecoderConfig(preset="vicuna-7b", layers=4, width=4096, heads=32, kv_heads=32, mlp=11008, vocab=32000),
        rows=2,
        length=2048,
    ),
    Case(
        name="8 layers of CLIP-L, 8x576",
        config=ViTConfig(
            layers=8, width=1024, heads=16, mlp=4096, positions="learned2d", grid=24, activation="quick_gelu"
        ),
        rows=8,
        length=576,
    ),
)


def run(job: Job) -> None:
    """Compares values of mmjax's and PyTorch's layers in fp32, then times in bf16, then times FlexAttention.

    Notes them as ``cases`` and ``flex``, by case.
    """
    job.note(torch=torch.__version__, cuda=torch.version.cuda, torch_device=_torch_device())
    small = {case.name: _small(case) for case in CASES}
    results: dict[str, Any] = {name: {"fp32": compare(case)} for name, case in small.items()}
    job.note(cases=results)
    for name, result in results.items():
        job.check(f"{name}: the same values in fp32", max(result["fp32"].values()) <= LIMIT)
    for case in small.values() if job.small else CASES:
        for library, measure in (("ours", time_ours), ("torch", time_torch), ("torch compiled", time_compiled)):
            try:
                results[case.name][library] = measure(case)
            except Exception as error:  # of a compiler that is not here, for instance: the other times still count
                results[case.name][library] = failure(error)
            job.note(cases=results)
        seconds_ours = results[case.name]["ours"].get("seconds")
        seconds_torch = [results[case.name][library].get("seconds") for library in ("torch", "torch compiled")]
        if seconds_ours and any(seconds_torch):
            results[case.name]["ours over the better torch"] = seconds_ours / min(filter(None, seconds_torch))
        job.note(cases=results)
    _run_flex(job)


def _run_flex(job: Job) -> None:
    """FlexAttention by case of section ``attention``, as long as there is time."""
    flex: dict[str, Any] = {}
    cases = attention.SMALL if job.small else attention.CASES
    for case in job.while_time(cases, lambda case: f"FlexAttention: {case.name}"):
        try:
            from mmjax.bench.gpu.flex import measure  # an older PyTorch has none

            flex[case.name] = measure(case)
        except Exception as error:
            flex[case.name] = failure(error)
        job.note(flex=flex)


def _small(case: Case) -> Case:
    """The case with small sizes."""
    sizes: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "mlp": 96}
    if case.causal:
        sizes |= {"kv_heads": 4, "vocab": 64}
    return replace(case, config=replace(case.config, preset="tiny", **sizes), rows=2, length=24)


def weights(case: Case) -> Leaves:
    """Random weights in fp32, by name such as "attn/q", stacked: [layers, …], the same at every call."""
    c, rng = case.config, np.random.default_rng(0)
    d, f, n = c.width, c.mlp, c.layers
    shapes = {f"attn/{name}": (d, d) for name in "qkvo"} | {"mlp/up": (d, f), "mlp/down": (f, d)}
    shapes |= {"attn_norm": (d,), "mlp_norm": (d,), "mlp/gate": (d, f)} if case.causal else _biases(d, f)
    return {name: _drawn(rng, (n, *shape), name) for name, shape in shapes.items()}


def _biases(d: int, f: int) -> dict[str, tuple[int, ...]]:
    norms = {f"{norm}/{part}": (d,) for norm in ("attn_norm", "mlp_norm") for part in ("scale", "bias")}
    return norms | {f"attn/{name}_bias": (d,) for name in "qkvo"} | {"mlp/up_bias": (f,), "mlp/down_bias": (d,)}


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> np.ndarray:
    numbers = rng.standard_normal(shape, np.float32)
    if len(shape) > 2:
        return numbers / np.float32(np.sqrt(shape[1]))
    return numbers * np.float32(0.1) + np.float32(name.endswith(("norm", "scale")))


def numbers(case: Case, seed: int) -> np.ndarray:
    """Random numbers ``[rows, length, width]`` in fp32: an input of the layers, or a cotangent of their output."""
    shape = (case.rows, case.length, case.config.width)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# ---- ours ------------------------------------------------------------------------------------------------------------


def ours(case: Case) -> Any:
    """mmjax's layers as a jitted function of ``weights``, input and cotangent.

    It returns the output, the gradients of the weights by name, and the gradient of the input.
    """
    submesh = World(jax.devices()[:1]).submesh(Layout(), 0)
    B, T, module = case.rows, case.length, module_of(case.config)

    def layers(leaves: Leaves, x_BTD: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        if not case.causal:
            positions = jnp.zeros((B, T, 2), jnp.int32)  # learned ones enter before the layers
        inputs = {"segments": jnp.ones((B, T), jnp.int32), "positions": positions}
        context = Context.of(submesh.axes, inputs, module.mask, Backend(max_runs=1))
        return run_layers(module, {"layers": nested(leaves)}, context, x_BTD)[0]

    def body(leaves: Leaves, x_BTD: jax.Array, cotangent_BTD: jax.Array) -> Any:
        y_BTD, back = jax.vjp(layers, leaves, x_BTD)
        return y_BTD, *back(cotangent_BTD)

    replicated = PartitionSpec()
    return jax.jit(Spmd(body, submesh.mesh, (replicated, replicated, replicated), (replicated, replicated, replicated)))


def time_ours(case: Case) -> dict[str, float]:
    """Times of mmjax's layers in bf16: "compile_seconds", and "seconds" of a forward and backward."""
    cast = partial(jax.tree.map, lambda a: jnp.asarray(a, jnp.bfloat16))
    leaves, x, cotangent = cast(weights(case)), cast(numbers(case, 1)), cast(numbers(case, 2))
    start = time.perf_counter()
    compiled = ours(case).lower(leaves, x, cotangent).compile()
    compile_seconds = time.perf_counter() - start
    return {"compile_seconds": compile_seconds, "seconds": seconds(lambda: compiled(leaves, x, cotangent))}


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def _torch_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_layers(case: Case) -> Callable[[Sequence[Leaves], Any], Any]:
    """The same layers as a function of torch tensors: of each layer's weights by name, and the input [B, T, D]."""
    c = case.config
    H, K = c.heads, c.head_width

    def rms_norm(x: Any, scale: Any) -> Any:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + c.norm_eps)).to(x.dtype) * scale

    def layer_norm(x: Any, p: Leaves, name: str) -> Any:
        return F.layer_norm(x, (c.width,), weight=p[f"{name}/scale"], bias=p[f"{name}/bias"], eps=EPS)

    def rotated(x: Any) -> Any:
        """``x [B, H, T, K]``: component i is paired with i + K/2."""
        half, T = K // 2, x.shape[2]
        frequency = c.rope_theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
        angle = torch.arange(T, dtype=torch.float32, device=x.device)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)

    def attend(h: Any, p: Leaves) -> Any:
        B, T, D = h.shape
        q, k, v = (_affine(h, p, f"attn/{n}").view(B, T, H, K).transpose(1, 2) for n in "qkv")
        if case.causal:
            q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
        return _affine(y.transpose(1, 2).reshape(B, T, D), p, "attn/o")

    def decoder_layer(x: Any, p: Leaves) -> Any:
        x = x + attend(rms_norm(x, p["attn_norm"]), p)
        h = rms_norm(x, p["mlp_norm"])
        return x + (F.silu(h @ p["mlp/gate"]) * (h @ p["mlp/up"])) @ p["mlp/down"]

    def encoder_layer(x: Any, p: Leaves) -> Any:
        x = x + attend(layer_norm(x, p, "attn_norm"), p)
        h = _affine(layer_norm(x, p, "mlp_norm"), p, "mlp/up")
        return x + _affine(h * torch.sigmoid(1.702 * h), p, "mlp/down")

    layer = decoder_layer if case.causal else encoder_layer

    def layers(leaves: Sequence[Leaves], x: Any) -> Any:
        for layer_leaves in leaves:
            x = layer(x, layer_leaves)
        return x

    return layers


def _affine(x: Any, p: Leaves, name: str) -> Any:
    y, bias = x @ p[name], p.get(f"{name}_bias")
    return y if bias is None else y + bias


def _tensors(case: Case, dtype: Any) -> tuple[list[Leaves], Any, Any]:
    """Weights of each layer, input and cotangent, as tensors on torch's device."""

    def tensor(array: np.ndarray, *, requires_grad: bool = True) -> Any:
        return torch.from_numpy(array).to(_torch_device(), dtype).requires_grad_(requires_grad)

    stacked = weights(case)
    leaves = [{name: tensor(leaf[i]) for name, leaf in stacked.items()} for i in range(case.config.layers)]
    return leaves, tensor(numbers(case, 1)), tensor(numbers(case, 2), requires_grad=False)


def _forward_and_backward(
    layers: Callable[..., Any], leaves: Sequence[Leaves], x: Any, cotangent: Any
) -> tuple[Any, Any]:
    y = layers(leaves, x)
    return y, torch.autograd.grad(
        y, [*(leaf for layer_leaves in leaves for leaf in layer_leaves.values()), x], cotangent
    )


def compare(case: Case) -> dict[str, float]:
    """Relative differences of both kinds of layers: of "output", the gradient of "input" and the "worst weight"'s.

    All is in fp32, products too.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    leaves, x, cotangent = _tensors(case, torch.float32)
    y, gradients = _forward_and_backward(torch_layers(case), leaves, x, cotangent)
    with matmul_precision("highest"):
        out, gradients_ours, gradient_to_x = jax.device_get(
            ours(case)(weights(case), numbers(case, 1), numbers(case, 2))
        )
    torch_gradients = [tensor.detach().cpu().numpy() for tensor in gradients]
    leaves_per_layer = len(leaves[0])
    by_name = {name: np.stack(torch_gradients[i:-1:leaves_per_layer]) for i, name in enumerate(leaves[0])}
    # The softmax cancels the bias of keys: its gradient is rounding on both sides.
    by_name.pop("attn/k_bias", None)
    worst = max(apart(gradients_ours[name], gradient) for name, gradient in by_name.items())
    return {
        "output": apart(out, y.detach().cpu().numpy()),
        "input": apart(gradient_to_x, torch_gradients[-1]),
        "worst weight": worst,
    }


def time_torch(case: Case, *, compiled: bool = False) -> dict[str, float]:
    """As ``time_ours``, of PyTorch's layers, through ``torch.compile`` if ``compiled``.

    "compile_seconds" are those of the first three calls.
    """
    layers = torch_layers(case)
    leaves, x, cotangent = _tensors(case, torch.bfloat16)
    run = torch.compile(layers) if compiled else layers
    start = time.perf_counter()
    for _ in range(3):
        _forward_and_backward(run, leaves, x, cotangent)
    _wait()
    first, times = time.perf_counter() - start, list[float]()
    for _ in range(2 if x.device.type == "cpu" else 10):
        start = time.perf_counter()
        _forward_and_backward(run, leaves, x, cotangent)
        _wait()
        times.append(time.perf_counter() - start)
    return {"compile_seconds": first, "seconds": statistics.median(times)}


def time_compiled(case: Case) -> dict[str, float]:
    """``time_torch`` of compiled layers."""
    return time_torch(case, compiled=True)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
