"""Checks that a configuration's layouts train like one device, by comparing steps with the dense reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from mmjax.assembly.buckets import build_packer, with_buckets
from mmjax.assembly.model import build_model, require_rates
from mmjax.assembly.packers import one_bucket
from mmjax.assembly.samples import open_source, require_same_data
from mmjax.configurable import require
from mmjax.data.loader import tokenizer_of
from mmjax.mesh.processes import is_first
from mmjax.mesh.world import World
from mmjax.models.config import family_setting
from mmjax.parity.compare import Comparison, compare
from mmjax.parity.dense import run_reference
from mmjax.parity.product import Session, initial_parameters, sample_packer
from mmjax.parity.samples import Maker, Samples
from mmjax.parity.shrink import Shrunk, shrink
from mmjax.progress import Progress
from mmjax.recipe import Recipe
from mmjax.user_code import names_code

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of a check.

    Attributes:
      comparison: the comparison with the reference.
      shrunk: the shrunk configuration that ran.
      programs: number of different programs of a step.
    """

    comparison: Comparison
    shrunk: Shrunk
    programs: int

    @property
    def ok(self) -> bool:
        """Whether the layouts train like one device."""
        return self.comparison.ok

    def numbers(self) -> dict[str, Any]:
        """The result as an object for ``json.dumps``; differences are relative, and the largest over the steps.

        "ok" is a bool. "loss", "grad" and each further quantity with a limit is the largest difference of any module,
        "modules" has them by module and quantity, and "limits" their limits. "first_off" has "step" and "what" as in
        ``Comparison.first_off``, or is None. "steps", "layouts" (text by module) and "programs" are of the shrunk
        configuration that ran.
        """
        comparison, recipe = self.comparison, self.shrunk.recipe
        modules = {m: {q: comparison.largest(q, m) for q in comparison.quantities} for m in comparison.modules}
        first = comparison.first_off()
        return {
            "ok": self.ok,
            **{quantity: comparison.largest(quantity) for quantity in comparison.limits},
            "modules": modules,
            "first_off": {"step": first[0], "what": first[1]} if first else None,
            "limits": dict(comparison.limits),
            "steps": recipe.train.steps,
            "layouts": {name: layout.describe() for name, layout in recipe.model.layouts.items()},
            "programs": self.programs,
        }


def check(
    recipe: Recipe,
    steps: int = 3,
    *,
    dtype: str = "float32",
    say: Say | None = None,
    style: str = "auto",
    uniform: bool = False,
) -> CheckReport | None:
    """Runs a shrunk configuration under its layouts and with the dense reference, and compares them.

    All processes call it. Only the first compares; the others return ``None``. Differences beyond the limits are no
    error: see ``CheckReport.ok``. Writes no file. JAX must not have been used before, or with as many CPU devices as
    the layouts need.

    Args:
      recipe: a checked configuration, as ``load_config(["run.gin"])`` gives it.
      steps: optimizer steps.
      dtype: dtype of the layouts, ``float32`` or ``bfloat16``; the reference always computes in fp32.
      say: called with a line for each shrunk part of the run, before anything runs.
      style: style of the progress display: "auto", "bar", "lines" or "silent"; see ``Progress``.
      uniform: whether all tokens have the same loss weight.

    Raises:
      ConfigError: the data do not fit the configuration, the reference cannot compute one of its modules or callbacks,
        or there are not enough virtual devices.
    """
    say = say or _say_nothing
    for line in itertools.chain(_user_modules(recipe), _user_callbacks(recipe)):
        say(line)
    tokenizer = tokenizer_of(recipe.data.settings, recipe.model.media)
    source = open_source(_without_held_out(recipe), split="train")
    require_same_data(recipe, source)
    recipe = with_buckets(recipe, source)
    build_packer(recipe, tokenizer, one_bucket=one_bucket(recipe), source=source)  # raises if the data do not fit
    require_rates(build_model(recipe, tokenizer), recipe.model.optimizers)
    shrunk = shrink(recipe, steps, tokenizer.vocab_size, dtype)
    for line in shrunk.changes:
        say(line)
    small, train = shrunk.recipe, shrunk.recipe.train
    maker = Maker.of(build_model(small, tokenizer), uniform=uniform, repeated=dtype != "float32")
    samples = Samples(maker=maker, sizes=shrunk.sizes, seed=train.seed)
    packer = sample_packer(small, tokenizer, samples)
    session = Session(small, packer, samples)
    programs, total = (len({*map(id, several)}) for several in (session.executor.programs(), session.programs()))
    with Progress(total, "compiling programs", log_every=max(1, total // 4), style=style) as bar:
        session.start(lambda done, _, __: bar.update(done))
    with Progress(steps, "steps under the layouts", log_every=steps, style=style) as bar:
        actual = session.run(bar.update)
    if not is_first():
        return None
    bar = Progress(steps, "steps of the dense reference", log_every=1, style=style)
    with bar, jax.default_device(session.parts.world.devices[0]):
        initial = initial_parameters(small, packer, World(session.parts.world.devices[:1]))
        expected = run_reference(
            session.placed.model,
            small.model.optimizers,
            initial,
            samples.steps(steps),
            clip_norm=train.clip_norm,
            report=bar.update,
            starts=actual.leaves[:steps],
        )
    comparison = compare(actual, expected, small.model.optimizers, clip_norm=train.clip_norm, dtype=dtype)
    return CheckReport(comparison=comparison, shrunk=shrunk, programs=programs)


def _say_nothing(line: str) -> None:
    del line


def _without_held_out(recipe: Recipe) -> Recipe:
    """The configuration without held-out records: a check makes its own samples and evaluates nothing."""
    return replace(recipe, sources={name: replace(source, held_out=0) for name, source in recipe.data.sources.items()})


def _user_modules(recipe: Recipe) -> Iterator[str]:
    """Yields a line for each encoder of the user's own, whose code the reference uses too.

    Raises:
      ConfigError: an LLM, a generator or an encoder that reads another one is the user's own.
    """
    for name, node in recipe.model.nodes.items():
        if names_code(node.kind):
            field = family_setting(name, node.role)
            fix = "check has a reference for encoders of one's own only; compare losses with a run on one device"
            require(node.role == "encoder", field, node.kind, fix)
            fix = "check has no reference for encoders of one's own that read another; compare with a run on one device"
            require(not recipe.model.sources(name), field, node.kind, fix)
            yield f"{name}: the reference does not know {node.kind}; its own code on one device takes its place there"


def _user_callbacks(recipe: Recipe) -> Iterator[str]:
    """Yields a line for each callback, which the reference calls too.

    Raises:
      ConfigError: a generator has a callback, or an encoder that reads another one.
    """
    for name, node in recipe.model.nodes.items():
        for place, value in node.callbacks.names.items():
            fix = "check has no reference for a generator's callbacks; compare losses with a run on one device"
            require(node.role != "generator", f"{name}/Callbacks.{place}", value, fix)
            fix = "check has no reference for callbacks of an encoder that reads another; compare with one device"
            reads_encoder = node.role == "encoder" and recipe.model.sources(name)
            require(not reads_encoder, f"{name}/Callbacks.{place}", value, fix)
            yield f"{name}: the reference calls {value} too, on one sample or medium at a time"
