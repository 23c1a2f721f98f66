"""Greedy decoding under a layout gives the tokens that the dense reference gives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import parity
import pytest
from parity import Case

from mmjax import reference
from mmjax.configurable import ConfigError
from mmjax.data.sample import meta_of
from mmjax.data.types import Sample
from mmjax.mesh.layout import Layout, cell_count
from mmjax.models.config import LLM
from mmjax.models.graph import multimodal
from mmjax.models.llama.module import Llama
from mmjax.models.module import Block, LayerGroup
from mmjax.models.projector.config import ProjectorConfig
from mmjax.pipeline.answers import Answer
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.pipeline.predict import Predictor

LIMIT = 3
CASES = {
    "non-colocated, two stages": Case(vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=2, pp=2)),
    "tied, two stages": Case(model="tied", vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=2, pp=2)),
    "tied, two stages, bf16": Case(
        model="tied", vision=Layout(dp=2), llm=Layout(dp=2, pp=2), transport="collective", dtype="bfloat16"
    ),
    "injected, two stages": Case(model="injected", vision=Layout(dp=2, rank_offset=2), llm=Layout(pp=2)),
    "colocated": Case(vision=Layout(dp=2), llm=Layout(tp=2), microbatches=1),
    "tp above kv_heads": Case(vision=Layout(dp=4), llm=Layout(tp=4), microbatches=1),
    "chunks": Case(model="chunked", vision=Layout(pp=2, chunks=2), llm=Layout(pp=2, chunks=3, rank_offset=2)),
    "one device": Case(),
    "windows, norms and groups": Case(
        model="families, tied", vision=Layout(rank_offset=4), llm=Layout(tp=2, dp=2), unroll=True
    ),
    "lanes": Case(vision=Layout(dp=2, lanes=2), llm=Layout(tp=2, pp=2), schedule="nested", microbatches=3),
    "a mask of words": Case(model="masked", vision=Layout(rank_offset=4), llm=Layout(tp=2, pp=2)),
    "sharded parameters": Case(
        vision=Layout(dp=4, shard="parameters", rank_offset=4),
        llm=Layout(dp=2, pp=2, shard="parameters"),
        microbatches=1,
    ),
    "sharded parameters, cp": Case(
        vision=Layout(dp=4, shard="parameters"),
        llm=Layout(dp=2, cp=2, cp_tokens="contiguous", shard="parameters"),
        microbatches=1,
    ),
    "adapted, three stages": Case(model="adapted", vision=Layout(rank_offset=3), llm=Layout(pp=3)),
}
MARKS = {
    **dict.fromkeys(("one device", "chunks", "tied, two stages, bf16"), pytest.mark.slow),
    **dict.fromkeys(("non-colocated, two stages", "tied, two stages", "injected, two stages"), pytest.mark.long),
    **dict.fromkeys(
        ("windows, norms and groups", "adapted, three stages", "lanes", "tp above kv_heads"), pytest.mark.long
    ),
    "a mask of words": pytest.mark.long,
    **dict.fromkeys(("sharded parameters", "sharded parameters, cp"), pytest.mark.long),
}


def prompts() -> list[Sample]:
    """An image, text alone, three images with room for one more token only, an image at the start."""
    samples = parity.step_samples(13)[0]
    chosen = {0: 13, 1: 9, 3: 19, 4: 14}
    return [
        replace(samples[i], tokens=samples[i].tokens[:end], prompt=end, loss_weights=samples[i].loss_weights[:end])
        for i, end in chosen.items()
    ]


def expected(samples: Sequence[Sample], stop: int, model: str = "plain") -> list[list[int]]:
    """By the reference; a row ends with the sequence."""
    leaves = moved_adapters(model)
    return [
        reference.greedy(leaves, parity.MODELS[model], s, max_new=min(LIMIT, parity.LENGTH - s.prompt + 1), eos=stop)
        for s in samples
    ]


def moved_adapters(model: str) -> dict[str, np.ndarray]:
    """Initial parameters by logical name; but low-rank adapters, which begin as nothing, do something."""
    rng, found = np.random.default_rng(1), {}
    for name, leaf in parity.initial_parameters(model).items():
        noise = 0.3 * rng.normal(size=leaf.shape) if "_lora/" in name else 0.0
        found[name] = (np.asarray(leaf) + noise).astype(leaf.dtype)
    return found


def predictor(case: Case, samples: Sequence[Sample]) -> tuple[Predictor, list[Any], list[np.ndarray], dict[str, Any]]:
    """A predictor, its microbatches, where their rows' prompts end, and fresh states."""
    layouts = case.config().model.layouts
    settings = Settings(optimizers=parity.optimizers(case), total_steps=1, transport=case.transport, dtype=case.dtype)
    model = replace(parity.MODELS[case.model], unroll=case.unroll)
    placed = PlacedModel(model, layouts, parity.world(), settings)
    packer = parity.make_packer(replace(case, samples=len(samples)), cell_count(layouts.values()), lists=False)
    batch = [parity.signed(part) for part in packer.step(0, samples).microbatches]
    starts = [(inputs[LLM]["segments"] > 0).sum(axis=1) for _, inputs in batch]
    made = Predictor(placed, dict(batch), case.microbatches)
    made.compile()
    leaves = {f"params/{name}": jax.numpy.asarray(leaf) for name, leaf in moved_adapters(case.model).items()}
    states = {name: stage.state.parameters_from_logical(leaves) for name, stage in placed.stages.items()}
    return made, batch, starts, states


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=n, marks=MARKS.get(n, ())) for n, c in CASES.items()],
)
def test_greedy_tokens_are_the_references(case: Case) -> None:
    samples = prompts()
    never = expected(samples, -1, case.model)
    assert {len(tokens) for tokens in never} == {2, LIMIT}  # 2: the row is full
    stop = never[0][1]  # ends the first answer early, perhaps others
    want = expected(samples, stop, case.model)
    assert len(want[0]) == never[0].index(stop) < 2  # an untrained tied model repeats what it reads

    made, batch, starts, states = predictor(case, samples)
    given = [{name: array.copy() for name, array in inputs[LLM].items()} for _, inputs in batch]
    made.load(states)
    for end, answers in ((stop, want), (-1, never), (stop, want)):
        rows = list(
            zip(itertools.chain(*made.generate(batch, starts, LIMIT, {end})), itertools.chain(*starts), strict=True)
        )
        assert [said.tokens for said, start in rows if start] == answers
        assert not any(said.tokens for said, start in rows if not start), "an empty row was continued"
    for (_, inputs), before in zip(batch, given, strict=True):
        for name, array in before.items():
            np.testing.assert_array_equal(inputs[LLM][name], array, err_msg=f"{name} of the caller was overwritten")
    assert not (made.inputs or made.carry or made.cotangents or made.in_transit or made.borrowed or made.states)


# ---- a cache gives what whole rows give ------------------------------------------------------------------------------


class Twice(Llama):
    """A language model of one's own, whose layers attend twice."""

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        def twice(group: LayerGroup, context: Any, x: Any) -> Block:
            inner: Any = group.block(context, x)
            return lambda x, p: inner(inner(x, p), p)

        return tuple(replace(group, block=partial(twice, group)) for group in super().groups)


MORE = 7
AGAIN = {
    "windows, norms and groups": Case(model="families", llm=Layout(tp=2, pp=2), vision=Layout(rank_offset=4)),
    "a module of one's own": Case(llm=Layout(dp=2), vision=Layout(dp=2, rank_offset=2), unroll=True),
    "bf16": Case(model="families, tied", dtype="bfloat16"),
    "a mask of prefixes": Case(model="masked, prefix", vision=Layout(rank_offset=4), llm=Layout(tp=2, pp=2)),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in AGAIN])
def test_a_cache_gives_what_whole_rows_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and log-probabilities of every answer, with each token computed again from the whole row before it."""
    case, samples = AGAIN[name], prompts()[:2]
    if "own" in name:
        own = multimodal(
            {"vision": parity.VIT}, Twice(parity.DECODER), projectors={"vision": ProjectorConfig(hidden=20)}
        )
        monkeypatch.setitem(parity.MODELS, case.model, own)
    made, batch, starts, states = predictor(case, samples)
    made.load(states)
    cached = made.generate(batch, starts, MORE, ())
    again = [[Answer() for _ in start] for start in starts]
    rows = [(signature, {**inputs, LLM: {n: a.copy() for n, a in inputs[LLM].items()}}) for signature, inputs in batch]
    ends = [start.copy() for start in starts]
    for _ in range(MORE):
        for m, said in enumerate(made.generate(rows, ends, 1, ())):
            given = rows[m][1][LLM]
            for row in np.flatnonzero(ends[m]):
                again[m][row].tokens.append(said[row].tokens[0])
                again[m][row].logprobs.append(said[row].logprobs[0])
                end = ends[m][row]
                given["tokens"][row, end] = said[row].tokens[0]
                given["segments"][row, end], given["positions"][row, end] = 1, end
                if "prefix" in name:  # text behind the prompt sees by the second rule, and is seen by it
                    given["is"][row, end], given["attends"][row, end] = 2, 2
                ends[m][row] += 1
    exact = case.dtype == "float32"
    for one, other in zip(itertools.chain(*cached), itertools.chain(*again), strict=True):
        assert len(one.tokens) == len(one.logprobs) in (0, MORE)
        if exact:
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
        elif one.tokens:  # sums of other shapes round otherwise, and a token may be another
            assert one.tokens[0] == other.tokens[0] and one.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.05)
    assert sum(len({*said.tokens}) for said in itertools.chain(*cached)) > 4, "they repeat one token"


@pytest.mark.long
def test_a_mask_that_shows_later_tokens_writes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = "text sees all before; media sees all everywhere"
    monkeypatch.setitem(parity.MODELS, "plain", parity.model_with(llm={"mask": rules}))
    made, batch, starts, states = predictor(Case(), prompts()[:1])
    made.load(states)
    with pytest.raises(ConfigError, match=r"llm/Decoder.mask='text sees.*'media sees all everywhere' shows tokens"):
        made.generate(batch, starts, MORE, ())


DRAWN = {
    "apart": Case(model="drawing twice", vision=Layout(tp=2, rank_offset=4), llm=Layout(tp=2, pp=2),
                  painter=Layout(dp=2, rank_offset=6)),
    "two stages, collective": Case(model="drawing", vision=Layout(), llm=Layout(pp=2),
                                   painter=Layout(pp=2, rank_offset=2), transport="collective"),
    "lanes": Case(model="drawing twice", vision=Layout(dp=2, lanes=2), llm=Layout(tp=2, pp=2), schedule="nested",
                  painter=Layout(lanes=4), microbatches=3),
    "streams": Case(model="drawing, streams", vision=Layout(), llm=Layout(), painter=Layout(tp=2, pp=2, rank_offset=1)),
    "references": Case(model="drawing, references", vision=Layout(), llm=Layout(), microbatches=3,
                       painter=Layout(tp=2, pp=2, rank_offset=1)),
    "guided, two stages": Case(model="drawing, guided", vision=Layout(tp=2, rank_offset=4), llm=Layout(tp=2, pp=2),
                               painter=Layout(pp=2, rank_offset=6)),
    "together": Case(model="drawing", vision=Layout(dp=2), llm=Layout(tp=2), painter=Layout(dp=2), microbatches=1),
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, id=n, marks=pytest.mark.slow) for n, c in DRAWN.items()])
def test_drawings_are_the_references(case: Case) -> None:
    """What comes of noise under a layout is what the dense reference integrates, picture by picture."""
    samples = [
        replace(sample, times={name: (1.0,) * len(own) for name, own in sample.times.items()})
        for sample in (s for s in parity.step_samples(13, case.model)[0] if s.noise)
    ]
    made, batch, starts, states = predictor(case, samples)
    model, leaves = made.placed.model, parity.initial_parameters(case.model)
    packer = parity.make_packer(replace(case, samples=len(samples)), made.placed.cells, lists=False)
    made.load(states)
    first, drawn = made.draw(batch), made.draw(batch)
    parts = packer.plan(0, [meta_of(sample, packer.encoders) for sample in samples]).microbatches
    per, seen = len(parts[0].metas), 0
    for name, generator in model.generators.items():
        for number, (part, patches) in enumerate(zip(parts, drawn[name], strict=True)):
            np.testing.assert_array_equal(patches, first[name][number])
            for index, media in packer.media(name, part, patches).items():
                c, want = generator.config, reference.draw(leaves, model, samples[number * per + index], name)
                for got, wanted in zip(media, want, strict=True):
                    np.testing.assert_allclose(
                        reference.cut_patches(got, c.patch, c.merge), wanted, rtol=1e-4, atol=1e-4
                    )
                    seen += 1
    assert seen == sum(len(own) for sample in samples for own in sample.noise.values()) > 3
    assert not (made.inputs or made.carry or made.in_transit)
    assert made.generate(batch, starts, 1, ())  # tokens and drawings in turn


@pytest.mark.long
def test_parameters_are_those_loaded_last() -> None:
    samples = prompts()
    made, batch, starts, states = predictor(CASES["colocated"], samples)
    made.load(
        {name: {**state, "master": jax.tree.map(lambda x: x * 0, state["master"])} for name, state in states.items()}
    )
    assert {token for said in made.generate(batch, starts, 2, ())[0] for token in said.tokens} == {
        0
    }  # all logits are equal
    made.load(states)
    first = [said.tokens[0] for said in made.generate(batch, starts, 1, ())[0] if said.tokens]
    assert first == [tokens[0] for tokens in expected(samples, -1)]


@pytest.mark.long
def test_another_number_of_microbatches_is_refused() -> None:
    case, samples = CASES["colocated"], prompts()
    made, batch, starts, _ = predictor(case, samples)
    with pytest.raises(ValueError, match="2 microbatches for a predictor of 1"):
        made.generate(batch * 2, starts * 2, LIMIT, ())


@pytest.mark.long
def test_tokens_by_lists_are_refused() -> None:
    """Prompts have whole rows: what points through lists would read other tokens."""
    case, samples = Case(vision=Layout(dp=2, rank_offset=4), llm=Layout(cp=2), microbatches=1), prompts()
    made, _, _, _ = predictor(case, samples)
    packer = parity.make_packer(replace(case, samples=len(samples)), made.placed.cells)
    with_lists = [parity.signed(part) for part in packer.step(0, samples).microbatches]
    with pytest.raises(ValueError, match=r"^vision/send_llm: a predictor takes whole rows"):
        made.losses(with_lists)
