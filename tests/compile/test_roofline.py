"""The roofline of compiled programs: what it reads of a CPU's text, and of lines that only a GPU's has."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
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
from mmjax.compile.hlo import Module, Shape, shapes
from mmjax.compile.rates import Rates
from mmjax.compile.roofline import Work, logit_arrays, pair_arrays, work_of

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
    sent = {kind: (one.count, one.bytes) for kind, one in work.collectives.items()}
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


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("Forward", ("bf16[7,64,64,320]", "bf16[640,3,3,320]"), "bf16[7,32,32,640]"),
        ("BiasActivationForward", ("bf16[7,64,64,320]", "bf16[640,3,3,320]"), "bf16[7,32,32,640]"),
        ("BackwardInput", ("bf16[7,32,32,640]", "bf16[640,3,3,320]"), "bf16[7,64,64,320]"),
        ("BackwardFilter", ("bf16[7,64,64,320]", "bf16[7,32,32,640]"), "bf16[640,3,3,320]"),
    ],
)
def test_convolutions_and_their_gradients_have_equal_flops(target: str, operands: tuple[str, str], result: str) -> None:
    """Of stride 2: an output's place reads 3 · 3 · 320 numbers for each of 640 channels."""
    layout = "{3,2,1,0}"
    lines = (
        *(
            f"  %{name} = {shape}{layout} parameter({place})"
            for place, (name, shape) in enumerate(zip("lr", operands, strict=True), 1)
        ),
        f"  %c = ({result}{layout}, u8[0]{{0}}) custom-call(%l, %r), window={{size=3x3 stride=2x2 pad=1_1x1_1}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}", backend_config={{}}',
    )
    work = work_of(Module.of(text(*lines)), RATES)
    assert work.flops["products"] == 2 * 7 * 32 * 32 * 640 * 9 * 320
    assert work.products == {"bf16 x bf16 -> bf16": 1}


def test_groups_and_asynchronous_collectives() -> None:
    lines = (
        "  %x = f32[1024]{0} parameter(1)",
        "  %s = f32[1024]{0} all-reduce-start(%x), replica_groups=[2,8]<=[16], to_apply=%add",
        "  %d = f32[1024]{0} all-reduce-done(%s)",
        "  %p = f32[1024]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
    )
    work = work_of(Module.of(text(*lines)), RATES)
    assert {kind: (one.count, one.bytes) for kind, one in work.collectives.items()} == {
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


def product(name: str, beta: str, result: str = "f32") -> str:
    config = (
        f'{{"gemm_backend_config":{{"beta":{beta},"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}}}'
    )
    results = f"({result}[128,512]{{1,0}}, s8[4096]{{0}})"
    return (
        f'  %{name} = {results} custom-call(%l, %r), custom_call_target="__cublas$lt$matmul", backend_config={config}'
    )


def test_products_by_dtype_launches_and_what_adds_to_an_accumulator() -> None:
    body = (
        "%body (l: bf16[128,256]) -> bf16[128,512] {",
        "  %l = bf16[128,256]{1,0} parameter(0)",
        "  %r = bf16[256,512]{1,0} parameter(1)",
        product("adds", "1"),
        product("plain", "0", "bf16"),
        "  %t = f32[128,512]{1,0} get-tuple-element(%adds), index=0",
        "}",
    )
    loop = (
        "  %y = bf16[128,256]{1,0} parameter(1)",
        '  %w = f32[8]{0} while(%y), condition=%until, body=%body, backend_config={"known_trip_count":{"n":"3"}}',
    )
    work = work_of(Module.of(text(*loop, more="\n".join(body))), RATES)
    assert work.products == {"bf16 x bf16 -> f32": 3, "bf16 x bf16 -> bf16": 3}
    assert (work.accumulating, work.kernels, work.launches, work.conditionals) == (3, 2, 6, 0)


def test_the_host_waits_for_conditionals() -> None:
    given = "  %q = bf16[2,64,4,16]{3,2,1,0} parameter(0)"
    branch = ["%one (q: bf16[2,64,4,16]) -> bf16[2,64,4,16] {", given, "  %f = f32[8]{0} copy(%q)", "}"]
    work = work_of(
        Module.of(text("  %c = f32[8]{0} conditional(%q, %q), branch_computations={%one}", more="\n".join(branch)))
    )
    assert (work.conditionals, work.kernels, work.launches) == (1, 1, 1)


def test_a_collective_between_nodes_goes_over_the_network() -> None:
    lines = (
        "  %x = f32[1024]{0} parameter(1)",
        "  %near = f32[1024]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}",
        "  %permuted = f32[1024]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
    )
    module, rates = Module.of(text(*lines)), replace(RATES, network=1e5)
    near, far = (work_of(module, rates, ranks=ranks).seconds["collectives"] for ranks in ((0, 1, 2, 3), (7, 8, 9, 10)))
    assert near == pytest.approx(2 * 4096 / 1e6 + 1) and far == pytest.approx(2 * 4096 / 1e5 + 1)
