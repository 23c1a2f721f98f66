"""The choice of a backend, and the code around libraries' kernels, which plain kernels replace here."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from stand_ins import H100, stand_in

from mmjax import jax_compat
from mmjax.assembly.assembly import assemble
from mmjax.attention import blockwise
from mmjax.attention.backends import KERNELS, XLA_BACKENDS, Backend
from mmjax.attention.custom_vjp import RESIDUAL_NAME
from mmjax.attention.kernels import AttentionCall, run_intervals, segment_runs
from mmjax.attention.mask import Mask
from mmjax.attention.reference import dense_attention
from mmjax.attention.row_runs import includes, runs_of
from mmjax.attention.settings import AUTO, BACKENDS, LIBRARIES
from mmjax.attention.tokens import Tokens
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.models.dit.config import DiTConfig
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.models.whisper.config import WhisperConfig

HEADS, GROUPS, WIDTH, TOKENS = 4, 2, 8, 24
ROWS_OF = {
    "one segment": [[1] * 24, [1] * 24],
    "one segment and padding": [[1] * 20 + [0] * 4, [1] * 24],
    "packed": [[1] * 5 + [2] * 15 + [0] * 4, [2] * 10 + [1] * 3 + [4] * 11],
    "many segments": [[1 + t // 2 for t in range(24)], [1] * 12 + [0] * 12],
    "padding first": [[0] * 3 + [1] * 21, [0] * 24],
}


def call_with(**changes: Any) -> AttentionCall:
    return AttentionCall(
        **{
            **dict(platform=H100[0], device_kind=H100[1], mask=Mask("causal"), dtype="bfloat16", queries=64, keys=64),
            **dict(heads=4, groups=2, width=128),
            **changes,
        }
    )


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_every_name_of_the_setting_is_a_way() -> None:
    assert {AUTO, *XLA_BACKENDS, *KERNELS} == set(BACKENDS) and KERNELS.keys() == LIBRARIES.keys()


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, "cudnn"),
        ({"mask": Mask("full"), "width": 64, "dtype": "float16"}, "cudnn"),
        ({"mask": Mask("causal", 16)}, "cudnn"),
        ({"device_kind": "NVIDIA A100-SXM4-80GB"}, "cudnn"),
        ({"platform": "cpu", "device_kind": "cpu"}, "blockwise"),
        ({"device_kind": "AMD Instinct MI300X"}, "blockwise"),
        ({"dtype": "float32"}, "blockwise"),
        ({"width": 20}, "blockwise"),
        ({"width": 256}, "blockwise"),
        ({"soft_cap": 50.0}, "blockwise"),
        ({"width": 128, "value_width": 64}, "blockwise"),
        ({"width": 64, "value_width": 64}, "cudnn"),
        ({"mask": Mask("full", grid_window=4)}, "blockwise"),
        ({"mask": Mask("causal", grid_window=4)}, "blockwise"),
        ({"mask": Mask.of("gemma3", 16)}, "blockwise"),
        ({"mask": Mask.of("paligemma")}, "blockwise"),
        ({"in_row_order": False}, "blockwise"),
        ({"cp_way": "all-to-all", "in_row_order": False}, "cudnn"),
        ({"cp_way": "gather", "in_row_order": False}, "blockwise"),
        ({"cp_way": "ring", "in_row_order": False}, "blockwise"),
    ],
)
def test_auto_is_the_kernel_where_it_fits(changes: dict[str, Any], way: str) -> None:
    call = call_with(**changes)
    assert Backend().resolve(call) == way
    assert Backend("dense").resolve(call) == "dense"
    if way == "cudnn":
        assert Backend("cudnn").resolve(call) == "cudnn"
    else:
        with pytest.raises(ConfigError, match=r"llm/Decoder.attention='cudnn': cuDNN .*; use 'auto' or 'blockwise'"):
            Backend("cudnn", "llm/Decoder.attention").resolve(call)


def test_a_call_says_what_is_asked() -> None:
    q, k = jnp.ones((1, 6, 4, 8), jnp.bfloat16), jnp.ones((1, 6, 2, 8), jnp.bfloat16)
    tokens = Tokens.of({"segments": jnp.ones((1, 6), jnp.int32)})
    found = AttentionCall.of(q, k, tokens, Mask("full"))
    assert found == AttentionCall("cpu", jax.devices()[0].device_kind, Mask("full"), "bfloat16", 6, 6, 4, 2, 8)
    cut = Tokens.of({"segments": tokens.segments_BT, "order": tokens.order_BT})
    assert not AttentionCall.of(q, k, cut, Mask("full")).in_row_order
    assert not AttentionCall.of(q, k, tokens, Mask("full"), cut).in_row_order
    among = AttentionCall.of(q, k, tokens, Mask("full"), cp_way="gather")
    assert among.cp_way == "gather" and not among.in_row_order


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (partial(DecoderConfig, attention="flash"), "Decoder.attention='flash': legal: 'auto', 'dense'"),
        (partial(ViTConfig, attention="cudn"), "ViT.attention='cudn'.*cudnn"),
        (partial(WhisperConfig, attention="x"), "Whisper.attention='x'"),
        (partial(DiTConfig, attention="x"), "DiT.attention='x'"),
        (partial(DecoderConfig, attention="cudnn", head_dim=20), "Decoder.attention='cudnn': .*not 20; use 'auto'"),
        (partial(DecoderConfig, attention="cudnn", head_dim=256), "Decoder.attention='cudnn': .*not 256"),
        (partial(DecoderConfig, attention="cudnn", score_cap=50.0), "Decoder.attention='cudnn': cuDNN has no soft cap"),
        (partial(ViTConfig, attention="cudnn", window=4), "ViT.attention='cudnn': cuDNN has no windows"),
        (partial(DecoderConfig, attention="cudnn", chunk=4), "Decoder.attention='cudnn': cuDNN has .* no chunks"),
        (partial(DecoderConfig, attention="cudnn", mask="gemma3"), "Decoder.attention='cudnn': .*none of other rules"),
    ],
)
def test_impossible_settings(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config()


def test_a_platform_without_the_kernel_is_refused_before_devices() -> None:
    given = ["llm/Decoder.attention='cudnn'", "Train.dtype='bfloat16'", "World.platform='cpu'"]
    with pytest.raises(ConfigError, match=r"llm/Decoder.attention='cudnn': .*World.platform is 'cpu'; use 'cuda'"):
        load_config([], given)
    assert load_config([], given[:2]).model["llm"].settings.attention == "cudnn"


@pytest.mark.long
def test_a_stage_for_other_devices_is_refused_when_it_is_built() -> None:
    """Where the platform is found only then."""
    given = ["llm/Decoder.attention='cudnn'", "Train.dtype='bfloat16'", "Train.microbatches=2", "Train.global_batch=4"]
    config = load_config([], given)
    with pytest.raises(ConfigError, match=r"llm/Decoder.attention='cudnn': cuDNN runs on NVIDIA's GPUs"):
        assemble(config)


# ---- around cuDNN's kernels ------------------------------------------------------------------------------------------


def test_runs_of_all_rows() -> None:
    segments = jnp.asarray([[1, 1, 2, 0], [2, 2, 2, 2]])
    first, length = segment_runs(segments, 6)
    assert first.tolist() == [0, 2, 3, 4, 8, 8] and length.tolist() == [2, 1, 1, 4, 0, 0]
    assert [x.tolist() for x in segment_runs(segments, 2)] == [[0, 2], [2, 6]]


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has plain kernels stand for libraries', on devices that stand for H100s."""
    stand_in(monkeypatch)


@pytest.fixture
def taken(plain_kernels: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways in which attention is computed, in order of the trace: "unpacked", "packed" or "blockwise"."""
    found: list[str] = []
    for module, prefix in ((jax_compat, "cudnn_"), (blockwise, "")):
        for way in ("forward", "backward"):
            kept = getattr(module, prefix + way)

            def told(*given: Any, kept: Any = kept, is_kernel: bool = bool(prefix), **options: Any) -> Any:
                has_runs = isinstance(given[-1], tuple)
                found.append(("packed" if has_runs else "unpacked") if is_kernel else "blockwise")
                return kept(*given, **options)

            monkeypatch.setattr(module, prefix + way, told)
    return found


def backend(name: str, mask: Mask, segments: Any) -> Backend:
    """The backend for rows whose number of runs is known."""
    return Backend(name, max_runs=runs_of(np.asarray(segments), cells=1, causal=mask.kind == "causal"))


def numbers() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    sizes = (HEADS, GROUPS, GROUPS, HEADS)
    return [jnp.asarray(rng.normal(size=(2, TOKENS, n, WIDTH)), jnp.float32) for n in sizes]


def both(attend: Any, mask: Mask, segments: Any, q: Any, k: Any, v: Any, d_out: Any) -> Any:
    """The output, 0 at padding, and gradients."""
    real = (segments > 0)[..., None, None]

    def run(*x: Any) -> Any:
        return jnp.where(real, attend(*x, Tokens.of({"segments": segments}), mask), 0)

    out, back = jax.vjp(run, q, k, v)
    return out, *back(d_out)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mask", "name", "branch"),
    [
        (Mask("causal"), "one segment", "unpacked"),
        (Mask("causal"), "one segment and padding", "unpacked"),
        (Mask("causal"), "packed", "packed"),
        (Mask("causal"), "many segments", "blockwise"),
        (Mask("causal"), "padding first", "packed"),
        (Mask("causal", 6), "one segment and padding", "unpacked"),
        (Mask("causal", 6), "packed", "blockwise"),
        (Mask("causal", TOKENS), "packed", "packed"),
        (Mask("full"), "one segment", "unpacked"),
        (Mask("full"), "one segment and padding", "packed"),
        (Mask("full"), "packed", "packed"),
        (Mask("full"), "many segments", "blockwise"),
    ],
)
def test_what_runs_is_the_oracle(taken: list[str], mask: Mask, name: str, branch: str) -> None:
    segments = jnp.asarray(ROWS_OF[name], jnp.int32)
    got = jax.jit(partial(both, backend(AUTO, mask, segments).attend, mask))(segments, *numbers())
    want = both(dense_attention, mask, segments, *numbers())
    for one, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(one, exact, rtol=1e-4, atol=2e-5)
    assert taken == [branch] * 2


@pytest.mark.parametrize("name", ["packed", "many segments"])
@pytest.mark.parametrize("max_runs", [1, 2, 3])
def test_rows_of_more_runs_than_were_told_are_wrong(taken: list[str], name: str, max_runs: int) -> None:
    """What the host says of rows is not checked on the device."""
    mask, segments = Mask("causal"), jnp.asarray(ROWS_OF[name], jnp.int32)
    got = jax.jit(partial(both, Backend(max_runs=max_runs).attend, mask))(segments, *numbers())
    want = both(dense_attention, mask, segments, *numbers())
    is_enough = includes(max_runs, runs_of(np.asarray(segments), cells=1, causal=True))
    equal = all(np.allclose(one, exact, rtol=1e-4, atol=2e-5) for one, exact in zip(got, want, strict=True))
    assert equal == is_enough and "blockwise" not in taken


@pytest.mark.parametrize("name", ROWS_OF)
def test_rows_of_which_nothing_is_known_are_computed_blockwise(taken: list[str], name: str) -> None:
    mask, segments = Mask("causal"), jnp.asarray(ROWS_OF[name], jnp.int32)
    got = jax.jit(partial(both, Backend("cudnn").attend, mask))(segments, *numbers())
    for one, exact in zip(got, both(dense_attention, mask, segments, *numbers()), strict=True):
        np.testing.assert_allclose(one, exact, rtol=1e-4, atol=2e-5)
    assert taken == ["blockwise"] * 2


def test_older_devices_take_no_packed_rows(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_compat, "device_kind", lambda device: ("gpu", "NVIDIA A100-SXM4-80GB"))
    for name in ("packed", "one segment"):
        mask, segments = Mask("causal"), jnp.asarray(ROWS_OF[name], jnp.int32)
        jax.jit(partial(both, backend(AUTO, mask, segments).attend, mask))(segments, *numbers())
    assert taken == ["blockwise"] * 2 + ["unpacked"] * 2


# ---- around tokamax's kernels ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("mask", [Mask("causal"), Mask("full"), Mask("causal", 6)], ids=str)
@pytest.mark.parametrize("name", ROWS_OF)
def test_intervals_are_the_oracle(mask: Mask, name: str) -> None:
    segments = jnp.asarray(ROWS_OF[name], jnp.int32)
    got = jax.jit(partial(both, Backend("tokamax").attend, mask))(segments, *numbers())
    for one, exact in zip(got, both(dense_attention, mask, segments, *numbers()), strict=True):
        np.testing.assert_allclose(one, exact, rtol=1e-4, atol=2e-5)


def test_intervals_of_a_row() -> None:
    first, last = run_intervals(jnp.asarray([[1, 1, 2, 0, 0], [3, 3, 3, 3, 3]]))
    assert first.tolist() == [[0, 0, 2, 3, 3], [0] * 5] and last.tolist() == [[2, 2, 3, 5, 5], [5] * 5]


def test_tokamax_that_is_not_installed_is_refused() -> None:
    if find_spec("tokamax"):
        pytest.skip("it is installed")
    with pytest.raises(ConfigError, match=r"Decoder.attention='tokamax': .*pip install tokamax==[0-9.]+\).*use 'auto'"):
        DecoderConfig(attention="tokamax")


# ---- in shard_map, under remat ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("way", ["cudnn", "tokamax"])
def test_in_shard_map(way: str) -> None:
    """Under ``check_vma``; rows over dp, of which one rank's are packed, heads over tp."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    segments = jnp.asarray([ROWS_OF["packed"][0], ROWS_OF["one segment"][0]], jnp.int32)
    local = partial(both, Backend(way, max_runs=4).attend, Mask("causal"))
    heads, rows = PartitionSpec("dp", None, "tp"), PartitionSpec("dp")
    run = jax.shard_map(local, mesh=mesh, in_specs=(rows, *(heads,) * 4), out_specs=(heads,) * 4)
    want = both(dense_attention, Mask("causal"), segments, *numbers())
    for got, exact in zip(jax.jit(run)(segments, *numbers()), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("way", ["cudnn", "tokamax"])
def test_what_is_kept_has_the_name_that_policies_keep(way: str) -> None:
    policy = jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME)
    segments = jnp.asarray(ROWS_OF["packed"], jnp.int32)

    def run(q: Any, k: Any, v: Any) -> Any:
        tokens = Tokens.of({"segments": segments})
        return jnp.sum(Backend(way, max_runs=3).attend(q * 1, k * 1, v * 1, tokens, Mask("causal")))

    q, k, v, _ = numbers()
    text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(run, policy=policy), (0, 1, 2)))(q, k, v))
    # Forward once and backward once, nothing again.
    assert text.count(" exp ") == {"cudnn": 3, "tokamax": 2}[way] and "cond[" not in text


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [Mask("causal"), Mask("full"), Mask("causal", 200)], ids=str)
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("segments", [1, 3, 90])
@pytest.mark.parametrize("way", ["cudnn", "tokamax"])
def test_kernels_are_dense_attention(way: str, segments: int, groups: int, mask: Mask) -> None:
    """In bf16, within its rounding; the last 50 tokens are padding."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(2, 600, n, 64)), jnp.bfloat16) for n in (8, groups, groups, 8))
    if why := KERNELS[way].refusal(
        AttentionCall.of(q, k, Tokens.of({"segments": jnp.ones((2, 600), jnp.int32)}), mask)
    ):
        pytest.skip(why)
    cut = jnp.asarray(1 + np.arange(600) * segments // 600).at[550:].set(0)
    rows = jnp.stack([cut, jnp.ones(600, jnp.int32)]).astype(jnp.int32)
    got = jax.jit(partial(both, backend(way, mask, rows).attend, mask))(rows, q, k, v, d_out)
    with jax.default_matmul_precision("highest"):
        want = both(dense_attention, mask, rows, *(x.astype(jnp.float32) for x in (q, k, v, d_out)))
    for one, exact in zip(got, want, strict=True):
        gap = jnp.linalg.norm(one.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
        assert gap < 2e-2
