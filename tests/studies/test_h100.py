"""The roofline of compiled programs: what it reads of a CPU's text, and of lines that only a GPU's has."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from mmjax.attention.blockwise import attention
from mmjax.attention.mask import Mask
from mmjax.attention.reference import dense_attention
from mmjax.attention.tokens import Tokens
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from studies.h100.compiled import Programs, devices
from studies.h100.hlo import Module, Shape, shapes
from studies.h100.roofline import Rates, Work, logit_arrays, pair_arrays, work_of

RATES = Rates(products=1e12, products32=1e12, forward=2e9, backward=1e9, memory=1e9, link=1e6, latency=0.5)


def module(function: Any, *shapes_: tuple[int, ...]) -> Module:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes_]
    text = jax.jit(function).lower(*avals).compile().as_text()
    assert text
    return Module.of(text)


def test_products_in_a_loop_count_by_its_trips() -> None:
    def run(x: Any, w: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    work = work_of(module(run, (32, 64), (5, 64, 64)), RATES)
    assert work.flops["products32"] == 5 * 2 * 32 * 64 * 64
    assert work.bytes >= 5 * 4 * 64 * 64


def test_bytes_of_an_elementwise_program_are_those_of_its_arrays() -> None:
    work = work_of(module(lambda x, y: jnp.sin(x) * y + 1, (256, 128), (256, 128)), RATES)
    assert work.bytes == 3 * 4 * 256 * 128
    assert work.seconds["memory"] == pytest.approx(work.bytes / RATES.memory) and not work.seconds["products"]


def test_a_slice_is_what_is_read() -> None:
    """A scan reads each layer's row once, not the stack each time."""

    def run(x: Any, stack: Any) -> Any:
        return lax.scan(lambda x, row: (x * row, None), x, stack)[0]

    work = work_of(module(run, (4096,), (50, 4096)), RATES)
    assert work.bytes < 50 * 8 * 4 * 4096


def test_collectives_by_kind_and_ranks() -> None:
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(x: Any) -> Any:
        y = lax.psum(x, "tp")
        z = lax.all_gather(x * 2, "tp", tiled=True)
        return y, lax.psum_scatter(z, "tp", tiled=True)

    spmd = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec("tp"), out_specs=(PartitionSpec(), PartitionSpec("tp")))
    work = work_of(module(spmd, (4 * 1024,)), RATES)
    sent = {kind: (one.count, one.bytes) for kind, one in work.sent.items()}
    assert sent == {"all-reduce": (1, 4096), "all-gather": (1, 4 * 4096), "reduce-scatter": (1, 4 * 4096)}
    moved = 4096 * 2 * 3 / 4 + 2 * 4 * 4096 * 3 / 4
    assert work.seconds["collectives"] == pytest.approx(moved / RATES.link + 3 * RATES.latency)
    assert work.total == work.computing + work.seconds["collectives"] and work.hidden == work.seconds["collectives"]


def test_what_lies_beside_what() -> None:
    work = Work()
    work.seconds |= {"products": 6.0, "memory": 2.0, "collectives": 4.0}
    assert (work.computing, work.total, work.hidden, work.chunked(4)) == (8.0, 12.0, 8.0, 9.0)
    work.seconds["collectives"] = 16.0
    assert (work.total, work.hidden, work.chunked(4)) == (24.0, 16.0, 16.0)


def test_arrays_of_all_pairs_are_found_and_blocks_are_none() -> None:
    def loss(attend: Any, q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(attend(q, k, v, Tokens.of({"segments": jnp.ones((1, 1280), jnp.int32)}), Mask("causal")))

    one = (1, 1280, 2, 8)
    found = [
        module(jax.grad(partial(loss, attend), (0, 1, 2)), one, one, one) for attend in (dense_attention, attention)
    ]
    dense, blocks = (pair_arrays(each, 1280) for each in found)
    assert any(shape.size >= 2 * 1280 * 1280 for shape in dense) and not blocks
    assert Shape("f32", (1, 1280, 2, 8)) in found[1].arrays


def test_logits_of_all_tokens_are_found_and_a_head_is_none() -> None:
    whole = module(lambda x, w: x @ w, (96, 32), (32, 500))
    assert logit_arrays(whole, 96, 500) and not logit_arrays(whole, 97, 500) and not logit_arrays(whole, 32, 501)


# ---- what only a GPU's programs have ---------------------------------------------------------------------------------


def fmha(mask: str, window: int = 0, backward: bool = False) -> str:
    call = {"intermediate_tensor_shape": {"dimensions": ["2", "4", "64", "64"]}, "mask_type": mask}
    config = json.dumps({"cudnn_fmha_backend_config": call | {"sliding_window_length": window}})
    target = "__cudnn$fmhaSoftmax" + "Backward" * backward
    results = "(bf16[2,4,64,16]{3,1,2,0}, f32[2,4,64]{2,1,0}, u8[0]{0})"
    return f'  %a = {results} custom-call(%q, %q, %q), custom_call_target="{target}", backend_config={config}'


def text(*lines: str, more: str = "") -> str:
    given = "  %q = bf16[2,64,4,16]{3,2,1,0} parameter(0)"
    return "\n".join([more, "ENTRY %main (q: bf16[2,64,4,16]) -> bf16[2,64,4,16] {", given, *lines, "}"])


@pytest.mark.parametrize(
    ("mask", "window", "pairs"), [("NO_MASK", 0, 64 * 64), ("CAUSAL", 0, 64 * 65 / 2), ("CAUSAL", 8, 36 + 56 * 8)]
)
def test_fused_attention_counts_the_pairs_that_its_mask_allows(mask: str, window: int, pairs: float) -> None:
    ahead, back = (work_of(Module.of(text(fmha(mask, window, way))), RATES) for way in (False, True))
    assert ahead.flops["attention"] == 4 * 2 * 4 * 16 * pairs
    assert back.flops["attention"] == 2.5 * ahead.flops["attention"]
    assert back.seconds["attention"] == pytest.approx(5 * ahead.seconds["attention"])
    assert ahead.targets == {"__cudnn$fmhaSoftmax": 1}


def test_a_branch_of_a_conditional_is_chosen() -> None:
    head = "%{} (q: bf16[2,64,4,16]) -> bf16[2,64,4,16] {{"
    given = "  %q = bf16[2,64,4,16]{3,2,1,0} parameter(0)"
    branches = [head.format("one"), given, fmha("CAUSAL"), "}", head.format("two"), given, fmha("NO_MASK"), "}"]
    one = "  %c = (bf16[2,4,64,16]{3,1,2,0}) conditional(%q, %q, %q), branch_computations={%one, %two}"
    found = Module.of(text(one, more="\n".join(branches)))
    flops = [work_of(found, RATES, branch=branch).flops["attention"] for branch in (0, 1, 2)]
    assert flops == [4 * 2 * 4 * 16 * pairs for pairs in (64 * 65 / 2, 64 * 64, 64 * 64)]


def test_products_of_cublas_and_their_workspace() -> None:
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    lines = (
        "  %l = bf16[128,256]{1,0} parameter(1)",
        "  %r = bf16[256,512]{1,0} parameter(2)",
        "  %m = (bf16[128,512]{1,0}, s8[33554432]{0}) custom-call(%l, %r), "
        f'custom_call_target="__cublas$lt$matmul", backend_config={config}',
    )
    work = work_of(Module.of(text(*lines)), RATES)
    assert work.flops["products"] == 2 * 128 * 256 * 512
    assert work.bytes == 2 * (128 * 256 + 256 * 512 + 128 * 512)


def test_groups_and_asynchronous_collectives() -> None:
    lines = (
        "  %x = f32[1024]{0} parameter(1)",
        "  %s = f32[1024]{0} all-reduce-start(%x), replica_groups=[2,8]<=[16], to_apply=%add",
        "  %d = f32[1024]{0} all-reduce-done(%s)",
        "  %p = f32[1024]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
    )
    work = work_of(Module.of(text(*lines)), RATES)
    assert {kind: (one.count, one.bytes) for kind, one in work.sent.items()} == {
        "all-reduce": (1, 4096),
        "collective-permute": (1, 4096),
    }
    assert work.seconds["collectives"] == pytest.approx((4096 * 2 * 7 / 8 + 4096) / RATES.link + 2 * RATES.latency)


@pytest.mark.parametrize("sync", ["false", "true"])
def test_a_collective_lies_beside_what_is_between_its_start_and_its_end(sync: str) -> None:
    """7 KB at 1 MB/s and half a second, beside 17 MB at 1 GB/s, in a loop of three."""
    config = f'backend_config={{"collective_backend_config":{{"is_sync":{sync}}}}}'
    body = (
        "%body (q: f32[1024]) -> f32[1024] {",
        "  %x = f32[1024]{0} parameter(0)",
        "  %b = f32[2097152]{0} parameter(1)",
        f"  %s = f32[1024]{{0}} all-reduce-start(%x), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, {config}",
        "  %c = f32[2097152]{0} copy(%b)",
        "  %e = f32[1024]{0} copy(%x)",
        "  %d = f32[1024]{0} all-reduce-done(%s)",
        "  %f = f32[2097152]{0} copy(%b)",
        "}",
    )
    loop = (
        "  %y = f32[1024]{0} parameter(1)",
        '  %w = f32[1024]{0} while(%y), condition=%until, body=%body, backend_config={"known_trip_count":{"n":"3"}}',
    )
    work = work_of(Module.of(text(*loop, more="\n".join(body))), RATES)
    assert work.seconds["collectives"] == pytest.approx(3 * 0.507168)
    between = 2 * 4 * (2097152 + 1024) / RATES.memory
    assert work.shown == pytest.approx(3 * (0.507168 - between if sync == "false" else 0.507168))
    assert work.ordered == pytest.approx(work.computing + work.shown)


def test_types_with_indices_and_tuples() -> None:
    assert shapes("(s32[], bf16[1,8]{1,0}, pred[4])") == (Shape("s32", ()), Shape("bf16", (1, 8)), Shape("pred", (4,)))
    assert Shape("bf16", (1, 8)).bytes == 16


@pytest.mark.long
@pytest.mark.compiled
@pytest.mark.parametrize(("way", "target"), [("auto", "__cudnn$fmhaSoftmax"), ("blockwise", ""), ("dense", "")])
def test_a_configuration_compiled_for_h100s(way: str, target: str) -> None:
    """A stage at tp 2: the way's kernels or none, arrays of all pairs in the oracle alone, reduce-scatters counted."""
    sizes = ["llm/Decoder.layers=2", "llm/Decoder.width=256", "llm/Decoder.mlp=512", f"llm/Decoder.attention='{way}'"]
    run = ["Train.dtype='bfloat16'", "Train.microbatches=2", "Train.global_batch=2", "vision/Layout.rank_offset=2"]
    rows = ["Data.sequence_length=1120", "llm/Packing.buckets=()", "llm/Layout.tp=2"]
    programs = Programs(load_config([], sizes + run + rows))
    for name, runs in (("F llm.0", 2), ("B llm.0", 2)):
        compiled = programs.compiled(name)
        work = compiled.work()
        found = {one.removesuffix("Backward"): times for one, times in work.targets.items() if "fmha" in one}
        assert found == ({target: runs} if target else {})
        assert bool(pair_arrays(compiled.module, 1120)) == (way == "dense")
        assert work.sent["reduce-scatter"].count >= 2 * runs and work.total > work.hidden
    assert 0 < programs.step(hidden=True) < programs.step()


@pytest.mark.long
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("buckets", "mask"), [("()", "CAUSAL"), ("((2, 512),)", "PADDING_CAUSAL")], ids=["whole rows", "packed rows"]
)
def test_no_program_waits_for_a_branch(buckets: str, mask: str) -> None:
    """XLA copies the index of a conditional to the host, and waits; F, B and W have none."""
    sizes = [f"llm/Decoder.{name}" for name in ("layers=2", "width=256", "mlp=512", "remat='full'")]
    sizes += ["vision/ViT.width=128", "vision/ViT.heads=2", "Data.sequence_length=512"]
    run = ["Train.dtype='bfloat16'", "Train.microbatches=2", "Train.global_batch=8", "Train.schedule='zb-h1'"]
    layouts = ["vision/Layout.rank_offset=2", "llm/Layout.pp=2"]
    programs = Programs(load_config([], [*sizes, *run, *layouts, f"llm/Packing.buckets={buckets}"]))
    assert {name[0] for name in programs.names} == {"F", "B", "W"}
    for name in programs.names:
        computations = programs.compiled(name).module.computations.values()
        instructions = [one for computation in computations for one in computation.values()]
        assert not any(one.branches for one in instructions), name
        kernels = [one.text for one in instructions if "__cudnn$fmha" in one.text]
        assert bool(kernels) == (name[0] != "W")
        assert all(f'"mask_type": "{mask}"' in text for text in kernels if "llm" in name)


def test_without_a_compiler_for_cuda_it_says_what_to_install() -> None:
    if find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin"):
        pytest.skip("it is here")
    with pytest.raises(ConfigError, match=r"pip install 'jax\[cuda12\]'; no GPU is needed"):
        devices(1)
