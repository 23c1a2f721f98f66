"""Language models against transformers: weights through the table, and hidden states, logits and log-probabilities.

``tests/oracles/make_llm.py`` made the folders; each has several sequences, which are packed into one row here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file
from spmd_runs import AXES, context, on_tp, slice_of

from mmjax.models.llama import layers
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.module import Llama
from mmjax.models.llama.weights import rows, settings, to_hf_config, unused
from mmjax.models.module import run_layers
from mmjax.models.parameters import Leaf, join_logical, split_logical
from mmjax.models.vocabulary import cross_entropy
from mmjax.reference import decoder as reference_decoder
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.table import SAME, assemble, expand, match

ORACLES = Path(__file__).parents[1] / "oracles"
FAMILIES = sorted(path.name for path in (ORACLES / "llm").iterdir() if path.is_dir())
LATENT = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
GEMMA4 = ("gemma4_text", "gemma4_moe", "gemma4_shared", "gemma4_per_layer")
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", *LATENT)
LENGTH = 64
BOUNDS = {"qwen3_5_text": 1e-4, "qwen3_5_moe_text": 1e-4, "gemma4_text": 3e-5}
"""Of differences, where it is not 1e-5: of Qwen3.5 numbers in fp32 are nearly as far from those of fp64, and scores of
Gemma 4 are not divided by a root, which enlarges rounding.
"""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Oracle:
    """A folder: its type, the model's settings, its leaves in fp32, tensors as they lie there, and what transformers
    computed.
    """

    kind: str
    c: DecoderConfig
    leaves: Arrays
    tensors: Arrays
    values: Arrays

    def sequences(self, name: str) -> list[np.ndarray]:
        """Tokens or values by sequence."""
        lengths = self.values["lengths"] - (name == "logprobs")
        return np.split(self.values[name], np.cumsum(lengths)[:-1])


def load(folder: Path) -> Oracle:
    """Reads a folder through the table."""
    hf_config = json.loads((folder / "config.json").read_text())
    c = DecoderConfig(**settings(hf_config))
    tensors, values = load_file(folder / "model.safetensors"), dict(np.load(folder / "values.npz"))
    opened = WeightsFolder.open(str(folder))
    matches = match(expand(rows(c, hf_config["model_type"]), c.layers), tensors, unused(c))
    assert not matches.missing and not matches.unexpected
    leaves, part = {}, slice_of(Llama(c), "llm")
    shapes = {
        name.removeprefix("llm/"): own.logical_shape for own in jax.tree.leaves(part.leaves()) for name in own.names
    }
    assert matches.places.keys() == shapes.keys()
    for leaf, (key, view) in matches.places.items():
        whole = tuple(slice(0, n) for n in shapes[leaf])
        leaves[leaf] = view.read(opened.tensor(key), shapes[leaf], whole).astype(np.float32)
    return Oracle(hf_config["model_type"], c, leaves, tensors, values)


@cache
def oracle(family: str) -> Oracle:
    return load(ORACLES / "llm" / family)


def parameters(of: Oracle, tp: int = 1) -> tuple[Any, list[Leaf]]:
    """The model's parameters in one stage, and their leaves in the order of the tree's."""
    own, tree = jax.tree.flatten(replace(slice_of(Llama(of.c), "llm"), tp=tp).leaves())
    named = {f"llm/{leaf}": jnp.asarray(value) for leaf, value in of.leaves.items()}
    return jax.tree.unflatten(tree, join_logical(own, named)), own


def packed(of: Oracle) -> tuple[Arrays, list[int]]:
    """A row that holds all sequences, and where each begins."""
    given = {name: np.zeros((1, LENGTH), np.int32) for name in ("tokens", "segments", "positions", "targets")}
    starts = np.cumsum([0, *of.values["lengths"]]).tolist()
    for number, tokens in enumerate(of.sequences("tokens")):
        place = slice(starts[number], starts[number + 1])
        row = {"tokens": tokens, "segments": number + 1, "positions": np.arange(len(tokens))}
        for name, value in (row | {"targets": np.roll(tokens, -1)}).items():
            given[name][0, place] = value
    return given, starts


def computed(of: Oracle, tp: int = 1) -> dict[str, list[np.ndarray]]:
    """Our values by sequence, of a row that holds all of them."""
    module, (params, own), (given, starts) = Llama(of.c), parameters(of, tp), packed(of)

    def body(p: Any, given: Any) -> dict[str, jax.Array]:
        surroundings = context(module, **given)
        x, *_ = run_layers(module, p, surroundings, module.embed(p, surroundings))
        hidden = module.end(p, surroundings, x)
        logits = layers.logits(p, of.c, AXES, hidden)
        return {"hidden": hidden, "logits": logits, "logprobs": -cross_entropy(logits, given["targets"], AXES)}

    specs = (jax.tree.unflatten(jax.tree.structure(params), [leaf.spec(AXES) for leaf in own]), P())
    out = {"hidden": P(), "logits": P(None, None, "tp"), "logprobs": P()}
    got = jax.jit(lambda *args: on_tp(tp, body, *args, specs=specs, out=out))(params, given)
    ends = {"hidden": 0, "logits": 0, "logprobs": 1}
    return {
        name: [np.asarray(value)[0, start : end - ends[name]] for start, end in pairwise(starts)]
        for name, value in got.items()
    }


def apart(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference as a share of the largest value."""
    return float(np.abs(got[..., : want.shape[-1]] - want).max() / np.abs(want).max())


LARGE = ("deepseek_v2", "qwen3_5_moe_text", "qwen3_5_text", "gemma4_moe", "gemma4_per_layer")
"""Families whose programs take longest to compile; smaller ones have each of their layers but the delta layers."""
CASES = [pytest.param(family, 1, marks=[pytest.mark.long] if family in LARGE else []) for family in FAMILIES]
CASES += [("qwen2", 2), ("deepseek_v3", 2), ("olmo2", 2)]
CASES += [
    pytest.param(family, 2, marks=pytest.mark.long)
    for family in ("qwen3_5_text", "qwen3", "gemma2", "phi3", "deepseek_v2_lite", "gemma3_text", "olmo3", *GEMMA4)
]


@pytest.mark.parametrize(("family", "tp"), CASES)
def test_values_are_those_of_transformers(family: str, tp: int) -> None:
    got = computed(oracle(family), tp)
    for name in ("hidden", "logits", "logprobs"):
        for one, want in zip(got[name], oracle(family).sequences(name), strict=True):
            axis = one if name != "logprobs" else one[:, None]
            wanted = want if name != "logprobs" else want[:, None]
            assert apart(axis, wanted) < BOUNDS.get(family, 1e-5), (name, len(want))


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_the_dense_reference_is_transformers_too(family: str) -> None:
    of = oracle(family)
    leaves = {f"llm/{name}": jnp.asarray(value) for name, value in of.leaves.items()}
    got = reference_decoder.decode(leaves, of.c, jnp.asarray(of.sequences("tokens")[-1]), ())
    assert apart(np.asarray(got), of.sequences("logits")[-1]) < BOUNDS.get(family, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("qwen2_moe", "deepseek_v3") else pytest.mark.long)
        for name in WITH_EXPERTS
    ],
)
def test_gradients_and_router_losses_are_those_of_transformers(family: str) -> None:
    """The balance loss of each sequence times its tokens, and gradients of it with the cross-entropy.

    Of DeepSeek's models gradients of the cross-entropy alone: there is no such loss in transformers.
    """
    of, golden = oracle(family), np.load(ORACLES / "llm" / "experts.npz")
    of = replace(of, c=replace(of.c, balance_loss=0.0 if family in LATENT else 0.5))
    module, (params, own), (given, starts) = Llama(of.c), parameters(of), packed(of)
    weights = (given["segments"] > 0).astype(np.float32)
    weights[0, np.array(starts[1:]) - 1] = 0

    def body(p: Any, given: Any) -> tuple[jax.Array, jax.Array]:
        surroundings = context(module, **given)
        x, _, sums = run_layers(module, p, surroundings, module.embed(p, surroundings))
        logits = layers.logits(p, of.c, AXES, module.end(p, surroundings, x))
        text = jnp.sum(weights * cross_entropy(logits, given["targets"], AXES))
        balance = sums.get("balance_loss", jnp.zeros(()))
        return text + of.c.balance_loss * balance, balance

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        return on_tp(1, body, params, given, out=(P(), P()))

    gradients, balance = jax.jit(jax.grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(balance, golden[f"{family}/balance_loss"], rtol=1e-5)
    ours = split_logical(own, jax.tree.leaves(gradients))
    theirs = {key.partition("layers.1.")[2]: golden[key] for key in golden if key.startswith(f"{family}/gradients")}
    theirs["experts.gate"], theirs["experts.up"] = np.split(theirs.pop("mlp.experts.gate_up_proj"), 2, axis=1)
    theirs["experts.down"] = theirs.pop("mlp.experts.down_proj")
    mine = {key: np.asarray(leaf) for key, leaf in ours.items() if key.startswith("llm/layers/001/")}
    mine.pop("llm/layers/001/experts/router_bias", None)  # whose gradient is a load here, and a buffer there
    assert len(mine) == len(theirs)
    for row in rows(of.c):
        key = row.keys[0].partition("{}.")[2].replace("block_sparse_moe", "mlp")
        key = row.leaf.replace("/", ".").partition("{}.")[2] if "*" in key else key
        if key in theirs:
            leaf = mine[f"llm/{row.leaf.format('001')}"]
            want = row.view.read(theirs.pop(key), leaf.shape, (slice(None),) * leaf.ndim)
            assert apart(leaf, want) < 5e-5, key
    assert not theirs


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_5_text", "gemma2", "gemma4_per_layer"),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("qwen3_5_moe_text", "gemma3_text", "olmo2", "phi3", *GEMMA4)
            if name != "gemma4_per_layer"
        ),
    ],
)
def test_gradients_of_packed_sequences_are_those_of_transformers(family: str) -> None:
    """Of the cross-entropies of three sequences in one row, which transformers runs each alone."""
    of, golden = oracle(family), np.load(ORACLES / "llm" / "experts.npz")
    module, (params, own), (given, starts) = Llama(of.c), parameters(of), packed(of)
    weights = (given["segments"] > 0).astype(np.float32)
    weights[0, np.array(starts[1:]) - 1] = 0

    def body(p: Any, given: Any) -> jax.Array:
        surroundings = context(module, **given)
        x, *_ = run_layers(module, p, surroundings, module.embed(p, surroundings))
        losses = layers.losses(p, of.c, AXES, module.end(p, surroundings, x), given["targets"], jnp.asarray(weights))
        return losses["loss"]

    gradients = jax.jit(jax.grad(lambda params: on_tp(1, body, params, given, out=P())))(params)
    mine = {key: np.asarray(leaf) for key, leaf in split_logical(own, jax.tree.leaves(gradients)).items()}
    theirs = {key.removeprefix(f"{family}/gradients/"): golden[key] for key in golden if key.startswith(f"{family}/g")}
    experts = "model.layers.0.mlp.experts"
    if f"{experts}.down_proj" in theirs:  # stacked there in memory
        gate, up = np.split(theirs.pop(f"{experts}.gate_up_proj"), 2, axis=1)
        down = theirs.pop(f"{experts}.down_proj")
        theirs |= {f"{experts}.*.{name}_proj.weight": x for name, x in (("gate", gate), ("up", up), ("down", down))}
    compared = set[str]()
    for entry in expand(rows(of.c, of.kind), of.c.layers):
        if (key := entry.keys[0]) in theirs:
            leaf = mine[f"llm/{entry.leaf}"]
            want = entry.view.read(theirs[key], leaf.shape, (slice(None),) * leaf.ndim)
            assert apart(leaf, want) < 1e-4, entry.leaf
            compared.add(key)
    assert compared == theirs.keys() and len(compared) >= 14


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_make_the_same_tensors_again(family: str) -> None:
    """Bit for bit, every leaf and every key once; and a configuration that means the same."""
    of = oracle(family)
    again = assemble(expand(rows(of.c, of.kind), of.c.layers), of.leaves)
    assert again.keys() == of.tensors.keys()
    for key, tensor in of.tensors.items():
        np.testing.assert_array_equal(again[key], tensor.astype(np.float32))
    assert DecoderConfig(**settings(to_hf_config(of.c, model_type=of.kind))) == of.c


def test_what_older_folders_have_beside_the_tensors() -> None:
    """Frequencies of every layer, and a tied head's copy; without a copy an untied head is missing."""
    tied, untied = oracle("qwen2").c, oracle("qwen3").c
    more = ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"]
    matches = match(expand(rows(tied), tied.layers), [*oracle("qwen2").tensors, *more], unused(tied))
    assert not matches.missing and not matches.unexpected
    assert matches.copies == {"lm_head.weight": ("embed", SAME)}
    alone = match(
        expand(rows(tied), tied.layers), [*oracle("qwen2").tensors.keys() - {"model.embed_tokens.weight"}, more[1]]
    )
    assert alone.places["embed"] == ("lm_head.weight", SAME) and not alone.missing and not alone.copies
    keys = oracle("qwen3").tensors.keys() - {"lm_head.weight"}
    matches = match(expand(rows(untied), untied.layers), [*keys, more[0], "model.new.weight"], unused(untied))
    assert (matches.missing, matches.unexpected) == (("lm_head.weight",), ("model.new.weight",))


def test_a_folder_may_have_a_layer_for_a_second_token() -> None:
    """DeepSeek-V3's folders have one behind the last layer, which transformers does not read either."""
    of = oracle("deepseek_v3")
    more = [f"model.layers.{of.c.layers}.{name}" for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")]
    matches = match(expand(rows(of.c), of.c.layers), [*of.tensors, *more, "model.layers.9.x"], unused(of.c))
    assert not matches.missing and matches.unexpected == ("model.layers.9.x",)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_live_values_and_folders_of_ours(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other random weights; and transformers computes the same from a ``config.json`` and tensors of ours."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ORACLES)
    monkeypatch.delitem(sys.modules, "make_llm", raising=False)
    import make_llm  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(make_llm, "HERE", tmp_path)
    monkeypatch.setattr(make_llm, "SEED", 100)
    make_llm.make(family)
    of = load(tmp_path / family)
    got = computed(of)
    for name in ("hidden", "logits"):
        for one, want in zip(got[name], of.sequences(name), strict=True):
            assert apart(one, want) < BOUNDS.get(family, 1e-5), (name, len(want))
    (tmp_path / family / "config.json").write_text(json.dumps(to_hf_config(of.c, model_type=of.kind, dtype="bfloat16")))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(of.sequences("tokens")[-1])[None].long()).logits[0].numpy()
    assert apart(got["logits"][-1], logits) < BOUNDS.get(family, 1e-5)
