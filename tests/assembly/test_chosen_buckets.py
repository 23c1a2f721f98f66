"""`Packing.buckets = 3`: chosen from the run's own data, recorded, and the same for all; nothing changes its values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from trial_runs import assert_same_training, write_tiny

from mmjax.assembly.assembly import planned_batch_spec
from mmjax.assembly.buckets import added_buckets, build_packer, with_buckets
from mmjax.assembly.orders import pair_costs
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.data import buckets
from mmjax.data.buckets import compute, per_microbatch
from mmjax.data.config import PackingConfig
from mmjax.data.loader import StepMaker
from mmjax.data.packing import Packer, holds
from mmjax.data.tokenizer import make_tokenizer
from mmjax.inspect.inspection import inspect
from mmjax.parity.compare import Run
from mmjax.parity.product import Session
from mmjax.recipe import Recipe
from mmjax.train.files import recorded
from mmjax.train.trainer import Trainer

STEPS = 2
LOOKED_AT = 48
UNEVEN = (
    f"Train.steps={STEPS}",
    "Optimizer.warmup=0",
    "Train.global_batch=16",
    "Train.microbatches=4",
    "Train.eval_samples=0",
    "Digits.images=(1, 4)",
    "Digits.digits=(1, 4)",
    "Digits.scale=(1.0, 2.0)",
    "Data.sequence_length=320",
)
PADDED = ("vision_patches_padded", "llm_tokens_padded")
TWO = ("vision/Packing.buckets=2", "llm/Packing.buckets=2")


def uneven(folder: Path, *more: str) -> Recipe:
    return load_config([write_tiny(folder)], [*UNEVEN, *more])


class Last(Packer):
    """Takes the last bucket alone, which holds everything."""

    def buckets(self, metas):
        return [{name: count - 1 for name, count in self.bucket_counts.items()}] * self.microbatches


def shares_of(line: str) -> list[float]:
    """The shares of compute that are padding: with all buckets, and with the last one alone."""
    return [float(word[:-1]) / 100 for word in line.split() if word.endswith("%")]


@pytest.fixture(scope="module", autouse=True)
def fewer_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_STEPS", (16, LOOKED_AT))
        yield


@pytest.fixture(scope="module")
def recipe(fewer_steps, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return uneven(tmp_path_factory.mktemp("buckets"), *TWO)


@pytest.fixture(scope="module")
def session(recipe: Recipe) -> Session:
    own = with_buckets(recipe)
    packer = build_packer(own, make_tokenizer("", tuple(recipe.model.encoders)))
    return Session(own, packer)


@pytest.mark.long
def test_padding_falls_and_losses_gradients_and_updates_stay(session):
    """In two buckets a module, and in the one that holds everything."""
    packer, recipe = session.parts.packer, session.recipe
    assert set(packer.bucket_counts.values()) == {2}
    source, size = open_source(recipe, split="train"), recipe.train.global_batch
    runs: list[Run] = []
    padded: list[dict[str, int]] = []
    session.executor.compile()
    for own in (packer, Last(**vars(packer))):
        make = StepMaker(source=source, packer=own, global_batch=size)
        session.batches = [make(step) for step in range(STEPS)]
        padded.append({name: sum(batch.counts[name] for batch in session.batches) for name in PADDED})
        session.executor.initialise(recipe.train.seed)
        runs.append(session.run())
    for name in PADDED:
        assert padded[0][name] < 0.85 * padded[1][name], name
    mine, whole = runs
    assert_same_training(mine, whole)


@pytest.mark.long
def test_servers_and_every_process_choose_the_same(recipe, session):
    """A server from the configuration alone; and again."""
    served = planned_batch_spec(recipe).packer
    assert served == session.parts.packer
    assert with_buckets(recipe) == session.recipe and with_buckets(session.recipe) is session.recipe


def test_the_line_says_what_is_padding(recipe, session):
    """The share of padding that the line names also holds, roughly, for steps that the choice did not look at."""
    lines: list[str] = []
    with_buckets(recipe, say=lines.append)
    found = {line.partition("/")[0]: line for line in lines}
    packer, source = session.parts.packer, open_source(recipe, split="train")
    metas = [source.meta(10**7 + index) for index in range(16 * 40)]
    plans = [packer.plan(0, metas[16 * step : 16 * step + 16]) for step in range(40)]
    for name, pairs in pair_costs(recipe).items():
        own = per_microbatch(packer.buckets_of(name), 2)
        assert f"{name}/Packing.buckets={own}: chosen from {4 * LOOKED_AT} microbatches; " in found[name]
        parts = [part for step in plans for part in step.microbatches]
        sizes = [n for meta in metas for n in ((meta.tokens,) if name == "llm" else meta.patches.get(name, ()))]
        real = sum(compute((1, n), pairs) for n in sizes)
        taken = [part.bucket[name] for part in parts], [-1] * len(parts)
        for share, own in zip(shares_of(found[name]), taken, strict=True):
            padded = 2 * sum(compute(packer.buckets_of(name)[bucket], pairs) for bucket in own)
            assert share == pytest.approx(1 - real / padded, abs=0.04)


@pytest.mark.long
def test_a_run_keeps_its_buckets(tmp_path):
    """They are in its config.gin, and stay for the same batches; others, or another number of buckets, choose anew."""
    config, run_dir = uneven(tmp_path, "vision/Packing.buckets=2"), tmp_path / "run"
    for lines in (1, 0):
        with Trainer(config, run_dir, style="silent") as trainer:
            assert trainer._files and len(trainer.chosen) == lines
            trainer._files.begin(trainer.recipe, trainer.parts.planned, trainer.step)
            own = trainer.parts.packer.buckets_of("vision")
            assert trainer.recipe.model["vision"].packing.buckets == per_microbatch(own, 2) and len(own) == 2
    before = recorded(run_dir)
    own = per_microbatch(own, 2)
    assert before and before.model["vision"].packing.buckets == own
    # A sign that they are those of the file, and not chosen again.
    marked = (*own, (9, 64))
    before = replace(before, model=before.model.with_packing({"vision": PackingConfig(buckets=marked)}))
    train, three = config.train, config.model.with_packing({"vision": PackingConfig(buckets=3)})
    config = replace(config, model=three)
    for asked, recorded_, kept in (
        (replace(config, train=replace(train, steps=7), data=config.data.with_settings(workers=3)), before, True),
        (replace(config, train=replace(train, microbatches=8)), before, False),
        (replace(config, task=replace(config.data.task, scale=(1.0, 1.5))), before, False),
        (replace(config, model=three.with_packing({"vision": PackingConfig(buckets=2)})), before, False),
    ):
        found = with_buckets(asked, before=recorded_).model["vision"].packing.buckets
        assert (found == marked) is kept
    assert recorded(tmp_path / "nowhere") is None


@pytest.mark.slow
def test_reordered_samples_have_buckets_of_their_own(tmp_path):
    """Samples of a size are together, and less of their shapes is padding; `inspect` shows which there are."""
    padding = {}
    for method in ("none", "best"):
        lines: list[str] = []
        config = uneven(tmp_path, f"Data.reorder={method}", "vision/Packing.buckets=3")
        with_buckets(config, say=lines.append)
        padding[method] = shares_of(lines[0])[0]
    assert padding["best"] < padding["none"] - 0.02
    found = inspect(config, 1)
    assert found.chosen == tuple(lines) and lines[0] in list(found.describe())
    assert json.loads(json.dumps(found.numbers()))["chosen"] == lines
    used = [(use.rows, use.width) for use in found.used["best"]["vision"]]
    assert len(used) == 3 and all(f"({2 * rows}, {width})" in lines[0] for rows, width in used)


@pytest.mark.parametrize("dp", [1, 2, 4, 3])
def test_given_buckets_are_of_a_microbatch_under_any_layout(tmp_path, dp):
    """Each of the cells has its share of the rows; where none holds the largest cell, one that does is added."""
    shapes = ("vision/Packing.buckets=((8, 64), (16, 64))", "llm/Packing.buckets=((2, 320), (3, 320))")
    config = uneven(tmp_path, *shapes, f"vision/Layout.dp={dp}", "llm/Layout.tp=1", "llm/Layout.rank_offset=6")
    source = open_source(config, split="train")
    packer, worst = build_packer(config, make_tokenizer("", config.model.media), source=source), source.worst_case()
    most = -(-4 // dp)  # samples of a cell
    for name, given in (("vision", (8, 16)), ("llm", (2, 3))):
        own = packer.buckets_of(name)
        assert {-(-rows // dp) for rows in given} <= {rows for rows, _ in own}
        segments = [worst.tokens] * most if name == "llm" else [worst.patches[name]] * worst.media[name] * most
        assert any(holds(bucket, segments) for bucket in own)
        assert len(own) <= 3
    said = list(added_buckets(config, packer))
    assert [line.partition("/")[0] for line in said] == [n for n in ("vision", "llm") if len(packer.buckets_of(n)) > 2]
    assert all(" is added, which holds the largest batch of this layout" in line for line in said)


def test_rows_that_cp_rounds_up_are_chosen_given_and_recorded_as_they_are_allowed(tmp_path):
    """34 tokens are rows of 36 over three ranks: what is chosen is legal under any layout, and nothing is added."""
    cp = ("Data.sequence_length=34", "Digits.images=(1, 2)", "Digits.digits=(1, 2)", "Digits.scale=(1.0, 1.0)")
    cp += ("llm/Layout.tp=1", "llm/Layout.cp=3", "vision/Layout.rank_offset=4")
    found = with_buckets(uneven(tmp_path, *cp, "llm/Packing.buckets=3"))
    chosen = found.model.llm.packing.given
    assert max(width for _, width in chosen) == 34
    packer = build_packer(found, make_tokenizer("", found.model.media))
    assert max(width for _, width in packer.buckets_of("llm")) == 36 and len(packer.buckets_of("llm")) == len(chosen)
    assert list(added_buckets(found, packer)) == []


def test_one_program_shares_a_step_s_largest_bucket(tmp_path):
    """So the choice is for the fullest microbatches of steps."""
    shared = ("vision/Layout.rank_offset=0", "llm/Layout.tp=1", "llm/Layout.dp=2")
    least = []
    for layouts in ((), shared):
        config = with_buckets(uneven(tmp_path, "vision/Packing.buckets=2", *layouts))
        least.append(min(rows * width for rows, width in config.model["vision"].packing.given))
    assert least[0] < least[1]
