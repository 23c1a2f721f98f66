"""Libraries' kernels where a mask is one of words, and where the tokens of rows lie on several ranks.

Plain kernels stand for them, see ``stand_ins``; the oracle has scores of all pairs.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from stand_ins import stand_in

from mmjax.attention import blockwise
from mmjax.attention.backends import KERNELS, Backend
from mmjax.attention.exchange import gather_tokens, token_info_with_order
from mmjax.attention.kernels import AttentionCall, RowOrder, visible_intervals
from mmjax.attention.mask import Mask
from mmjax.attention.reference import dense_attention
from mmjax.attention.tokens import Tokens
from mmjax.config import load_config
from mmjax.configurable import ConfigError

pytestmark = pytest.mark.long

ROWS, TOKENS, HEADS, GROUPS, WIDTH = 2, 60, 4, 2, 8
ITEMS = [[0] * 5 + [1] * 10 + [2] * 7 + [0] * 8 + [3] * 9 + [0] * 3 + [4] * 4 + [0] * 14] * ROWS
SEGMENTS = [[1] * 30 + [2] * 23 + [3] * 4 + [0] * 3, [1] * 60]
RUNS = {
    "causal": Mask("causal"),
    "window": Mask("causal", 9),
    "full": Mask("full"),
    "cornstarch": Mask.of("cornstarch"),
    "gemma3": Mask.of("gemma3", 6),
    "paligemma": Mask.of("paligemma"),
    "chunks": Mask("causal", grid_window=7),
}
"""Masks that show each token a run of those of its sample."""
OTHERS = {
    "media see all media": Mask.of("text sees all before; media sees media everywhere"),
    "grid": Mask("full", grid_window=2),
}
QUICK = ("window", "cornstarch", "grid")
"""Masks with which `make test` exchanges what is needed, which takes several seconds to compile."""


@pytest.fixture
def stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def rows(mask: Mask, name: str, seed: int = 0, *, permuted: bool = True) -> dict[str, np.ndarray]:
    """What the mask reads of two rows, in blocks of four tokens that are in another order in each."""
    items, segments = np.asarray(ITEMS), np.asarray(SEGMENTS)
    media = items > 0
    begun = [[own.index(segment) for segment in own] for own in SEGMENTS]
    place = np.arange(TOKENS) - np.asarray(begun)
    prefix = place < 12
    positions = np.stack([place // 6, place % 6], axis=-1) if name == "grid" else place[..., None]
    inputs: dict[str, np.ndarray] = {"segments": segments, "items": items, "positions": positions}
    one, two = np.uint32(1), np.uint32(2)
    if name == "paligemma":
        inputs |= {"is": np.where(prefix, one | two, two), "attends": np.where(prefix, one, two)}
    elif name == "gemma3":
        inputs |= {"is": np.where(media, one | two, one), "attends": np.where(media, one | two, one)}
    elif mask.kind == "words":
        inputs |= {"is": np.where(media, one | two, one), "attends": np.where(media, two, one)}
    inputs = {
        n: x if n in ("is", "attends") else x.astype(np.int32) for n, x in inputs.items() if n in mask.input_names
    }
    inputs = {n: x if n == "positions" else np.broadcast_to(x, segments.shape) for n, x in inputs.items()}
    if not permuted:
        return inputs
    rng = np.random.default_rng(seed)
    order = np.stack([np.arange(TOKENS).reshape(-1, 4)[rng.permutation(TOKENS // 4)].reshape(-1) for _ in range(ROWS)])
    inputs = {n: np.stack([own[at] for own, at in zip(x, order, strict=True)]) for n, x in inputs.items()}
    return inputs | ({"order": order.astype(np.int32)} if "order" in mask.input_names else {})


def numbers() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(ROWS, TOKENS, n, WIDTH)).astype(np.float32) for n in (HEADS, GROUPS, GROUPS, HEADS)]


def both(attend: Any, segments: Any, q: Any, k: Any, v: Any, d_out: Any) -> Any:
    """The output, 0 at padding, and gradients."""
    real = (segments > 0)[..., None, None]
    out, back = jax.vjp(lambda *x: jnp.where(real, attend(*x), 0), q, k, v)
    return out, *back(d_out)


def across_ranks(name: str, cp_way: str, ranks: int, mask: Mask, inputs: Any, *, with_precomputed: bool = True) -> Any:
    """Output and gradients by a kernel, with the tokens of rows on several ranks."""
    mesh, spec = Mesh(np.array(jax.devices()[:ranks]), ("cp",)), PartitionSpec(None, "cp")

    def run(inputs: Any, *arrays: Any) -> Any:
        tokens, backend = Tokens.of(inputs, ("cp",)), Backend(name, max_runs=3)
        keys = gather_tokens(tokens, mask, ("cp",), cp_way)
        precomputed = backend.precompute(mask, tokens, keys, cp_way) if with_precomputed else None

        def attend(q: Any, k: Any, v: Any) -> Any:
            return backend.attend_across_ranks(
                q, k, v, tokens, mask, keys, axes=("cp",), cp_way=cp_way, precomputed=precomputed
            )

        return both(attend, inputs["segments"], *arrays)

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(inputs, *numbers())


def require_equal(got: Any, mask: Mask, inputs: Any) -> None:
    tokens = Tokens.of({name: jnp.asarray(x) for name, x in inputs.items()})
    attend = lambda q, k, v: dense_attention(q, k, v, tokens, mask)  # noqa: E731
    wanted = both(attend, inputs["segments"], *numbers())
    for name, one, exact in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        np.testing.assert_allclose(one, exact, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is computed by blocks after all, in order."""
    told: list[str] = []
    for name in ("forward", "backward"):
        kept = getattr(blockwise, name)

        def tell(*given: Any, kept: Any = kept, name: str = name, soft_cap: float = 0.0) -> Any:
            jax.debug.callback(lambda: told.append(name))
            return kept(*given, soft_cap=soft_cap)

        monkeypatch.setattr(blockwise, name, tell)
    return told


@pytest.mark.usefixtures("stands_in")
@pytest.mark.parametrize("name", [*RUNS, *OTHERS])
def test_masks_of_words_on_one_rank(name: str, by_blocks: list[str]) -> None:
    mask = (RUNS | OTHERS)[name]
    inputs, backend = rows(mask, name, permuted=False), Backend("tokamax")
    tokens = Tokens.of({n: jnp.asarray(x) for n, x in inputs.items()})
    for precomputed in (None, backend.precompute(mask, tokens, None, "")):
        attend = partial(backend.attend, tokens=tokens, mask=mask, precomputed=precomputed)
        require_equal(jax.jit(partial(both, attend, inputs["segments"]))(*numbers()), mask, inputs)
    jax.effects_barrier()
    assert len(by_blocks) == (4 if name in OTHERS else 0)


@pytest.mark.usefixtures("stands_in")
@pytest.mark.parametrize(
    ("name", "cp_way", "ranks"),
    [
        pytest.param(name, *way, marks=pytest.mark.long if way[0] == "need" and name not in QUICK else ())
        for name, way in product([*RUNS, *OTHERS], [("gather", 3), ("need", 3), ("all-to-all", 2)])
    ],
)
def test_intervals_among_ranks(name: str, cp_way: str, ranks: int, by_blocks: list[str]) -> None:
    mask = (RUNS | OTHERS)[name]
    inputs = rows(mask, name)
    require_equal(
        across_ranks("tokamax", cp_way, ranks, mask, inputs, with_precomputed=name != "cornstarch"), mask, inputs
    )
    jax.effects_barrier()
    assert bool(by_blocks) == (name in OTHERS)


@pytest.mark.usefixtures("stands_in")
@pytest.mark.parametrize("name", ["causal", "full"])
def test_cudnn_has_whole_rows_of_some_heads(name: str, by_blocks: list[str]) -> None:
    inputs = rows(RUNS[name], name)
    require_equal(across_ranks("auto", "all-to-all", 2, RUNS[name], inputs), RUNS[name], inputs)
    jax.effects_barrier()
    assert not by_blocks


@pytest.mark.usefixtures("stands_in")
def test_rows_that_lie_in_order_have_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of tokens on ranks, as they stand; and a kernel that is given permuted keys as they lie is seen."""
    inputs = rows(RUNS["causal"], "causal", permuted=False)
    require_equal(across_ranks("tokamax", "gather", 2, RUNS["causal"], inputs), RUNS["causal"], inputs)
    monkeypatch.setattr(RowOrder, "to_row_order", lambda self, x: x)
    inputs = rows(RUNS["causal"], "causal")
    with pytest.raises(AssertionError, match="out"):
        require_equal(across_ranks("tokamax", "gather", 2, RUNS["causal"], inputs), RUNS["causal"], inputs)


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from([*RUNS, *OTHERS]), seed=st.integers(0, 999), block=st.integers(1, TOKENS))
def test_runs_are_what_the_mask_shows(name: str, seed: int, block: int) -> None:
    """Of permuted queries among keys in order, however many queries are looked at together."""
    mask = (RUNS | OTHERS)[name]
    query_tokens = token_info_with_order(
        Tokens.of({n: jnp.asarray(x) for n, x in rows(mask, name, seed).items()}), mask
    )
    row = RowOrder.of(query_tokens)
    key_tokens = {n: row.to_row_order(x) for n, x in query_tokens.items()}
    first, last = visible_intervals(mask, query_tokens, key_tokens, block)
    allowed = np.asarray(mask.allowed(*(mask.inputs(Tokens.of(one)) for one in (query_tokens, key_tokens))))
    real = np.asarray(query_tokens["segments"] > 0)
    index = np.arange(TOKENS)
    within = (index >= np.asarray(first)[..., None]) & (index < np.asarray(last)[..., None])
    assert mask.shows_intervals == (name in RUNS) == bool((within == allowed)[real].all())
    assert (within | ~allowed)[real].all() and (last > first).all() and np.asarray(last).max() <= TOKENS


def test_keys_come_back_to_their_places() -> None:
    order = np.stack([np.random.default_rng(row).permutation(TOKENS) for row in range(ROWS)])
    row, x = RowOrder.of({"order": jnp.asarray(order), "segments": jnp.ones_like(order)}), numbers()[1]
    np.testing.assert_array_equal(row.to_row_order(jnp.asarray(order)), np.tile(np.arange(TOKENS), (ROWS, 1)))
    np.testing.assert_array_equal(row.from_row_order(row.to_row_order(jnp.asarray(x))), x)


@pytest.mark.usefixtures("stands_in")
def test_under_remat_nothing_runs_again() -> None:
    policy = jax.checkpoint_policies.save_only_these_names("attention")
    mask = RUNS["cornstarch"]
    tokens = Tokens.of({n: jnp.asarray(x) for n, x in rows(mask, "cornstarch", permuted=False).items()})

    def run(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(Backend("tokamax").attend(q * 1, k * 1, v * 1, tokens, mask))

    text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(run, policy=policy), (0, 1, 2)))(*numbers()[:3]))
    assert text.count(" exp ") == 2 and "cond[" not in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["llm/Decoder.attention='cudnn'"], r"attention='cudnn': with llm/Layout.cp=2, cuDNN needs .*'all-to-all'"),
        (["llm/Decoder.attention='dense'"], r"llm/Decoder.attention='dense': is for whole rows, .*'blockwise'"),
        (["llm/Decoder.attention='cudnn'", "llm/Layout.cp_way='ring'"], r"not 'ring'; set one, or .* to 'auto'"),
    ],
)
def test_ways_that_do_not_fit_are_refused_before_devices(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], [*given, "Train.dtype='bfloat16'", "llm/Layout.cp=2"])


def test_a_kernel_that_fits_is_accepted() -> None:
    given = [
        "llm/Decoder.attention='cudnn'",
        "llm/Layout.cp=2",
        "llm/Layout.cp_way='all-to-all'",
        "vision/Layout.rank_offset=2",
    ]
    config = load_config([], [*given, "Train.dtype='bfloat16'"])
    assert config.model["llm"].layout.cp_way == "all-to-all"


# ---- kernels by themselves: here plain ones, and libraries' on a GPU -------------------------------------------------


def gaps(kernel: str, name: str, dtype: Any) -> list[float]:
    """Relative errors of the output and gradients of permuted tokens: for tokamax as two ranks ask, one by one."""
    mask = (RUNS | OTHERS)[name]
    tokens = Tokens.of({n: jnp.asarray(x) for n, x in rows(mask, name).items()})
    rng = np.random.default_rng(0)
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(ROWS, TOKENS, n, 64)), dtype) for n in (8, 2, 2, 8))
    call = AttentionCall.of(q, k, tokens, mask, cp_way="all-to-all", max_runs=3)
    if why := KERNELS[kernel].refusal(call):
        pytest.skip(why)
    with jax.default_matmul_precision("highest"):
        attend = lambda q, k, v: dense_attention(q, k, v, tokens, mask)  # noqa: E731
        exact = both(attend, tokens.segments_BT, *(x.astype(jnp.float32) for x in (q, k, v, d_out)))
    key_tokens, backend, half = token_info_with_order(tokens, mask), KERNELS[kernel].of(call), TOKENS // 2
    real = (tokens.segments_BT > 0)[..., None, None]
    outs, found = [], []
    for part in [slice(TOKENS)] if kernel == "cudnn" else [slice(half), slice(half, TOKENS)]:
        query_tokens = {n: x[:, part] for n, x in key_tokens.items()}
        out, stats = jax.jit(backend.forward)(q[:, part], k, v, query_tokens, key_tokens)
        outs.append(jnp.where(real[:, part], out, 0))
        found.append(
            jax.jit(backend.backward)(q[:, part], k, v, query_tokens, key_tokens, out, stats, (d_out * real)[:, part])
        )
    dqs, dks, dvs = zip(*found, strict=True)
    got = [jnp.concatenate(x, 1) for x in (outs, dqs)] + [jnp.stack(x).sum(0) for x in (dks, dvs)]
    norm = jnp.linalg.norm
    return [float(norm(one.astype(jnp.float32) - e) / norm(e)) for one, e in zip(got, exact, strict=True)]


@pytest.mark.usefixtures("stands_in")
@pytest.mark.parametrize(("kernel", "name"), [("cudnn", "window"), ("tokamax", "gemma3")])
def test_plain_kernels_take_permuted_tokens(kernel: str, name: str) -> None:
    assert max(gaps(kernel, name, jnp.float32)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*RUNS, *OTHERS])
@pytest.mark.parametrize("kernel", ["cudnn", "tokamax"])
def test_kernels_take_permuted_tokens(kernel: str, name: str) -> None:
    """In bf16, within its rounding."""
    assert max(gaps(kernel, name, jnp.bfloat16)) < 2e-2
