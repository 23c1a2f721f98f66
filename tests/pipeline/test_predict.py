"""Greedy decoding under a layout gives the tokens that the dense reference gives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import parity
import pytest
from parity import Case

from mmjax import reference
from mmjax.data.sample import meta_of
from mmjax.data.types import Sample
from mmjax.mesh.layout import Layout, cell_count
from mmjax.models.config import LLM
from mmjax.pipeline.build import PlacedModel, Settings
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
    "chunks": Case(model="chunked", vision=Layout(pp=2, chunks=2), llm=Layout(pp=2, chunks=3, rank_offset=2)),
    "one device": Case(),
}
MARKS = {
    **dict.fromkeys(("one device", "chunks", "tied, two stages, bf16"), pytest.mark.slow),
    **dict.fromkeys(("non-colocated, two stages", "tied, two stages", "injected, two stages"), pytest.mark.long),
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
    leaves = parity.initial_parameters(model)
    return [
        reference.greedy(leaves, parity.MODELS[model], s, max_new=min(LIMIT, parity.LENGTH - s.prompt + 1), eos=stop)
        for s in samples
    ]


def predictor(case: Case, samples: Sequence[Sample]) -> tuple[Predictor, list[Any], list[np.ndarray], dict[str, Any]]:
    """A predictor, its microbatches, where their rows' prompts end, and fresh states."""
    layouts = case.config().layouts
    settings = Settings(optimizers=parity.optimizers(case), total_steps=1, transport=case.transport, dtype=case.dtype)
    placed = PlacedModel(parity.MODELS[case.model], layouts, parity.world(), settings)
    packer = parity.make_packer(replace(case, samples=len(samples)), cell_count(layouts.values()))
    batch = [parity.signed(part) for part in packer.step(0, samples).microbatches]
    starts = [(inputs[LLM]["segments"] > 0).sum(axis=1) for _, inputs in batch]
    made = Predictor(placed, dict(batch), case.microbatches)
    made.compile()
    key = jax.random.key(parity.SEED)
    return made, batch, starts, {name: stage.state.initialise(key) for name, stage in placed.stages.items()}


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
    assert not (made.inputs or made.carry or made.cotangents or made.travelling or made.borrowed or made.states)


DRAWN = {
    "apart": Case(model="drawing twice", vision=Layout(tp=2, rank_offset=4), llm=Layout(tp=2, pp=2),
                  painter=Layout(dp=2, rank_offset=6)),
    "two stages, collective": Case(model="drawing", vision=Layout(), llm=Layout(pp=2),
                                   painter=Layout(pp=2, rank_offset=2), transport="collective"),
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
    packer = parity.make_packer(replace(case, samples=len(samples)), made.placed.cells)
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
    assert not (made.inputs or made.carry or made.travelling)
    assert made.generate(batch, starts, 1, ())  # tokens and drawings in turn


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


def test_another_number_of_microbatches_is_refused() -> None:
    case, samples = CASES["colocated"], prompts()
    made, batch, starts, _ = predictor(case, samples)
    with pytest.raises(ValueError, match="2 microbatches for a predictor of 1"):
        made.generate(batch * 2, starts * 2, LIMIT, ())
