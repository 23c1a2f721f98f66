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
from mmjax.models.parameters import join_logical
from mmjax.models.vocabulary import cross_entropy
from mmjax.reference import decoder as reference_decoder
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.table import SAME, assemble, expand, match

ORACLES = Path(__file__).parents[1] / "oracles"
FAMILIES = sorted(path.name for path in (ORACLES / "llm").iterdir() if path.is_dir())
LENGTH = 64
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Oracle:
    """A folder: the model's settings, its leaves in fp32, tensors as they lie there, and what transformers computed."""

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
    c = DecoderConfig(**settings(json.loads((folder / "config.json").read_text())))
    tensors, values = load_file(folder / "model.safetensors"), dict(np.load(folder / "values.npz"))
    opened = WeightsFolder.open(str(folder))
    matches = match(expand(rows(c), c.layers), tensors, unused(c))
    assert not matches.missing and not matches.unexpected
    leaves, part = {}, slice_of(Llama(c), "llm")
    shapes = {
        name.removeprefix("llm/"): own.logical_shape for own in jax.tree.leaves(part.leaves()) for name in own.names
    }
    assert matches.places.keys() == shapes.keys()
    for leaf, (key, view) in matches.places.items():
        whole = tuple(slice(0, n) for n in shapes[leaf])
        leaves[leaf] = view.read(opened.tensor(key), shapes[leaf], whole).astype(np.float32)
    return Oracle(c, leaves, tensors, values)


@cache
def oracle(family: str) -> Oracle:
    return load(ORACLES / "llm" / family)


def computed(of: Oracle, tp: int = 1) -> dict[str, list[np.ndarray]]:
    """Our values by sequence, of a row that holds all of them."""
    module, lengths = Llama(of.c), of.values["lengths"]
    part = replace(slice_of(module, "llm"), tp=tp)
    own, tree = jax.tree.flatten(part.leaves())
    named = {f"llm/{leaf}": jnp.asarray(value) for leaf, value in of.leaves.items()}
    params = jax.tree.unflatten(tree, join_logical(own, named))
    given = {name: np.zeros((1, LENGTH), np.int32) for name in ("tokens", "segments", "positions", "targets")}
    starts = np.cumsum([0, *lengths])
    for number, tokens in enumerate(of.sequences("tokens")):
        place = slice(starts[number], starts[number + 1])
        row = {"tokens": tokens, "segments": number + 1, "positions": np.arange(len(tokens))}
        for name, value in (row | {"targets": np.roll(tokens, -1)}).items():
            given[name][0, place] = value

    def body(p: Any, given: Any) -> dict[str, jax.Array]:
        surroundings = context(module, **given)
        x, *_ = run_layers(module, p, surroundings, module.embed(p, surroundings))
        hidden = module.end(p, surroundings, x)
        logits = layers.logits(p, of.c, AXES, hidden)
        return {"hidden": hidden, "logits": logits, "logprobs": -cross_entropy(logits, given["targets"], AXES)}

    specs = (jax.tree.unflatten(tree, [leaf.spec(AXES) for leaf in own]), P())
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


CASES = [(family, 1) for family in FAMILIES] + [("qwen2", 2), pytest.param("qwen3", 2, marks=pytest.mark.long)]


@pytest.mark.parametrize(("family", "tp"), CASES)
def test_values_are_those_of_transformers(family: str, tp: int) -> None:
    got = computed(oracle(family), tp)
    for name in ("hidden", "logits", "logprobs"):
        for one, want in zip(got[name], oracle(family).sequences(name), strict=True):
            axis = one if name != "logprobs" else one[:, None]
            wanted = want if name != "logprobs" else want[:, None]
            assert apart(axis, wanted) < 1e-5, (name, len(want))


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_the_dense_reference_is_transformers_too(family: str) -> None:
    of = oracle(family)
    leaves = {f"llm/{name}": jnp.asarray(value) for name, value in of.leaves.items()}
    got = reference_decoder.decode(leaves, of.c, jnp.asarray(of.sequences("tokens")[-1]), ())
    assert apart(np.asarray(got), of.sequences("logits")[-1]) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_make_the_same_tensors_again(family: str) -> None:
    """Bit for bit, every leaf and every key once; and a configuration that means the same."""
    of = oracle(family)
    again = assemble(expand(rows(of.c), of.c.layers), of.leaves)
    assert again.keys() == of.tensors.keys()
    for key, tensor in of.tensors.items():
        np.testing.assert_array_equal(again[key], tensor.astype(np.float32))
    assert DecoderConfig(**settings(to_hf_config(of.c))) == of.c


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
            assert apart(one, want) < 1e-5, (name, len(want))
    (tmp_path / family / "config.json").write_text(json.dumps(to_hf_config(of.c, dtype="bfloat16")))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(of.sequences("tokens")[-1])[None].long()).logits[0].numpy()
    assert apart(got["logits"][-1], logits) < 1e-5
