"""Whether a configuration's layouts train as one device does: the configured steps against the dense reference's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from mmjax.config import Config
from mmjax.data.packing import Packer
from mmjax.data.tokenizer import make_tokenizer
from mmjax.mesh.layout import cell_count
from mmjax.mesh.processes import is_first
from mmjax.mesh.world import World
from mmjax.models.multimodal import LLM
from mmjax.parity.compare import LIMITS, QUANTITIES, Comparison, compare
from mmjax.parity.dense import run_reference
from mmjax.parity.product import Session, initial_parameters
from mmjax.parity.samples import Maker, make_steps
from mmjax.parity.shrink import Shrunk, shrink
from mmjax.run.assembly import build_packer, one_bucket, open_source, with_buckets
from mmjax.run.model import build_model, encoder_specs
from mmjax.run.progress import Progress

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found.

    Attributes:
      comparison: with the reference.
      shrunk: what ran.
      programs: how many were compiled.
    """

    comparison: Comparison
    shrunk: Shrunk
    programs: int

    @property
    def ok(self) -> bool:
        """Whether the layouts train as one device does."""
        return self.comparison.ok

    def numbers(self) -> dict[str, Any]:
        """The largest relative differences over the steps, in all and by module, and what ran."""
        found, config = self.comparison, self.shrunk.config
        modules = {m: {q: found.largest(q, m) for q in QUANTITIES} for m in found.modules}
        first = found.first_off()
        return {
            "ok": self.ok,
            **{quantity: found.largest(quantity) for quantity in LIMITS},
            "modules": modules,
            "first_off": {"step": first[0], "what": first[1]} if first else None,
            "limits": LIMITS,
            "steps": config.train.steps,
            "layouts": {name: layout.describe() for name, layout in config.layouts.items()},
            "programs": self.programs,
        }


def check(
    config: Config, steps: int = 3, *, say: Say = lambda line: None, style: str = "auto", uniform: bool = False
) -> Report | None:
    """Runs a configuration, shrunk, under its own layouts and by the dense reference, and compares.

    Of several processes all run it, and the first alone compares: the others get ``None``. Touches no file. JAX must
    not have been used before, or with as many CPU devices as the layouts need.

    Args:
      config: checked already; see ``load_config``.
      steps: optimizer steps.
      say: called with a line for each part of the run that is shrunk, before anything runs.
      style: of the progress display; see ``Progress``.
      uniform: whether all tokens have the same loss weight.

    Raises:
      ConfigError: the data do not fit the configuration, or the virtual devices cannot be had.
    """
    tokenizer = make_tokenizer(config.data.tokenizer, config.model.media)
    source = open_source(config, split="train")
    config = with_buckets(config, source)
    build_packer(config, tokenizer, one_bucket=one_bucket(config), source=source)  # raises where the data do not fit
    shrunk = shrink(config, steps, tokenizer.vocab_size)
    for line in shrunk.changes:
        say(line)
    small, train = shrunk.config, shrunk.config.train
    maker = Maker.of(build_model(small, tokenizer), uniform=uniform)
    samples = make_steps(maker, shrunk.rows, seed=train.seed, steps=steps)
    packer = Packer(
        encoders=encoder_specs(small),
        sequence_length=small.data.sequence_length,
        microbatches=train.microbatches,
        cells=cell_count(small.layouts.values()),
        pad=0,
        one_bucket=one_bucket(small),
        text=small.packing[LLM].given if LLM in small.packing else (),
    )
    session = Session(small, packer, samples)
    programs = len({id(program) for program in session.executor.programs()})
    with Progress(programs, "compiling programs", log_every=max(1, programs // 4), style=style) as bar:
        session.start(lambda done, _, __: bar.update(done))
    with Progress(steps, "steps under the layouts", log_every=steps, style=style) as bar:
        got = session.run(bar.update)
    if not is_first():
        return None
    bar = Progress(steps, "steps of the dense reference", log_every=1, style=style)
    with bar, jax.default_device(session.parts.world.devices[0]):
        initial = initial_parameters(small, packer, World(session.parts.world.devices[:1]))
        want = run_reference(session.placed.model, small.optimizers, initial, samples, train.clip_norm, bar.update)
    comparison = compare(got, want, small.optimizers, train.clip_norm)
    return Report(comparison=comparison, shrunk=shrunk, programs=programs)
