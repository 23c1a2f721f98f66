"""Whether a configuration's layouts train as one device does: the configured steps against the dense reference's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from mmjax.build.assembly import build_packer, one_bucket, open_source, require_same_data, with_buckets
from mmjax.build.model import build_model, require_rates
from mmjax.config import Config
from mmjax.configurable import require
from mmjax.data.loader import tokenizer_of
from mmjax.mesh.processes import is_first
from mmjax.mesh.world import World
from mmjax.models.config import setting_of
from mmjax.own_code import names_code
from mmjax.parity.compare import Comparison, compare
from mmjax.parity.dense import run_reference
from mmjax.parity.product import Session, initial_parameters, sample_packer
from mmjax.parity.samples import Maker, Samples
from mmjax.parity.shrink import Shrunk, shrink
from mmjax.progress import Progress

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of a check.

    Attributes:
      comparison: the comparison with the reference.
      shrunk: the shrunk configuration that ran.
      programs: number of programs of a step.
    """

    comparison: Comparison
    shrunk: Shrunk
    programs: int

    @property
    def ok(self) -> bool:
        """Whether the layouts train as one device does."""
        return self.comparison.ok

    def numbers(self) -> dict[str, Any]:
        """The largest relative differences over the steps, in all and by module, with the configuration that ran."""
        found, config = self.comparison, self.shrunk.config
        modules = {m: {q: found.largest(q, m) for q in found.quantities} for m in found.modules}
        first = found.first_off()
        return {
            "ok": self.ok,
            **{quantity: found.largest(quantity) for quantity in found.limits},
            "modules": modules,
            "first_off": {"step": first[0], "what": first[1]} if first else None,
            "limits": dict(found.limits),
            "steps": config.train.steps,
            "layouts": {name: layout.describe() for name, layout in config.layouts.items()},
            "programs": self.programs,
        }


def check(
    config: Config,
    steps: int = 3,
    *,
    dtype: str = "float32",
    say: Say = lambda line: None,
    style: str = "auto",
    uniform: bool = False,
) -> CheckReport | None:
    """Runs a shrunk configuration under its own layouts and by the dense reference, and compares them.

    All processes run it, and only the first compares: the others get ``None``. Touches no file. JAX must
    not have been used before, or with as many CPU devices as the layouts need.

    Args:
      config: a checked configuration; see ``load_config``.
      steps: optimizer steps.
      dtype: dtype of the layouts, ``float32`` or ``bfloat16``; the reference always computes in fp32.
      say: called with a line for each part of the run that is shrunk, before anything runs.
      style: style of the progress display; see ``Progress``.
      uniform: whether all tokens have the same loss weight.

    Raises:
      ConfigError: the data do not fit the configuration, or there are not enough virtual devices.
    """
    for line in itertools.chain(_own_modules(config), _own_callbacks(config)):
        say(line)
    tokenizer = tokenizer_of(config.data, config.model.media)
    source = open_source(_without_held_out(config), split="train")
    require_same_data(config, source)
    config = with_buckets(config, source)
    build_packer(config, tokenizer, one_bucket=one_bucket(config), source=source)  # raises where the data do not fit
    require_rates(build_model(config, tokenizer), config.optimizers)
    shrunk = shrink(config, steps, tokenizer.vocab_size, dtype)
    for line in shrunk.changes:
        say(line)
    small, train = shrunk.config, shrunk.config.train
    maker = Maker.of(build_model(small, tokenizer), uniform=uniform, repeated=dtype != "float32")
    samples = Samples(maker=maker, sizes=shrunk.sizes, seed=train.seed)
    packer = sample_packer(small, tokenizer, samples)
    session = Session(small, packer, samples)
    programs, total = (len({id(one) for one in own}) for own in (session.executor.programs(), session.programs()))
    with Progress(total, "compiling programs", log_every=max(1, total // 4), style=style) as bar:
        session.start(lambda done, _, __: bar.update(done))
    with Progress(steps, "steps under the layouts", log_every=steps, style=style) as bar:
        got = session.run(bar.update)
    if not is_first():
        return None
    bar = Progress(steps, "steps of the dense reference", log_every=1, style=style)
    with bar, jax.default_device(session.parts.world.devices[0]):
        initial = initial_parameters(small, packer, World(session.parts.world.devices[:1]))
        model, chosen = session.placed.model, samples.steps(steps)
        want = run_reference(model, small.optimizers, initial, chosen, train.clip_norm, bar.update)
    comparison = compare(got, want, small.optimizers, train.clip_norm, dtype)
    return CheckReport(comparison=comparison, shrunk=shrunk, programs=programs)


def _without_held_out(config: Config) -> Config:
    """A configuration whose sources hold nothing out: a check trains on samples of its own, and evaluates nothing."""
    return replace(config, sources={name: replace(source, held_out=0) for name, source in config.sources.items()})


def _own_modules(config: Config) -> Iterator[str]:
    """A line for each encoder of the user's own, for which its own code stands in the reference.

    Raises:
      ConfigError: an LLM or a generator is the user's own.
    """
    for name, kind, place in config.model.placed:
        if names_code(kind):
            field = setting_of(name, place)
            fix = "check has a reference for encoders of one's own only; compare losses with a run on one device"
            require(place == "encoder", field, kind, fix)
            yield f"{name}: the reference does not know {kind}; its own code on one device takes its place there"


def _own_callbacks(config: Config) -> Iterator[str]:
    """A line for each callback, which the reference calls too.

    Raises:
      ConfigError: a generator has one.
    """
    for name, callbacks in config.callbacks.items():
        for place, value in callbacks.given.items():
            fix = "check has no reference for a generator's callbacks; compare losses with a run on one device"
            require(name not in config.model.generators, f"{name}/Callbacks.{place}", value, fix)
            yield f"{name}: the reference calls {value} too, on one sample or medium at a time"
