"""`python -m mmjax.reorder --costs=FILE --dp=30 --pp=12 --microbatches=64 [--json]`: reorders samples by their costs.

FILE is JSON: {"encoder": [[forward, backward] of each sample], "llm": [forward, backward] of a microbatch in one
pipeline stage}, in any unit of time; "generator" may follow, like "encoder". `--json` prints one line:
{"ranks": [[[sample, …] of each microbatch, in the order in which they run] of each dp rank]}. JAX is never imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.configurable import ConfigError, one_of
from mmjax.data.reorder.chain import ENCODER, GENERATOR, LLM, Chain
from mmjax.data.reorder.pipeline import METHODS, Pipeline
from mmjax.flags import Flag, one_line_errors, parse_flags, run_plain
from mmjax.json_files import parse
from mmjax.schedule.schedules import INNER, NESTING, OFFLOADING, ONE_F_ONE_B, SCHEDULES, SURROUNDING, combined
from mmjax.schedule.validate import ScheduleError

USAGE = "python -m mmjax.reorder"
FLAGS = (
    Flag(
        name="costs",
        doc='JSON file: {"encoder": [[forward, backward] of each sample], "llm": [forward, backward] of a microbatch '
        'in one stage}; "generator" as "encoder".',
        required=True,
    ),
    Flag(name="dp", doc="data parallel ranks, each with a pipeline of its own.", default=1),
    Flag(name="pp", doc="pipeline stages of all modules together; if nested, of the LLM alone.", default=2),
    Flag(name="microbatches", doc="of a step.", default=1, required=True),
    Flag(name="method", doc=f"{', '.join(METHODS)}.", default="best"),
    Flag(
        name="schedule",
        doc="of the pipeline: 1f1b, gpipe, interleaved, eager-1f1b, zb-h1; or nested, where encoder and generator are "
        "spread over the ranks of the LLM, each of which computes other microbatches.",
        default=ONE_F_ONE_B,
    ),
    Flag(
        name="inner",
        doc=f"the LLM's own schedule inside a nested or three-phase one: {', '.join(INNER)}.",
        default=ONE_F_ONE_B,
    ),
    Flag(name="chunks", doc="stages of a module on each of its ranks, for interleaved.", default=1),
    Flag(name="encoder_pp", doc="how many of the stages are the encoder's.", default=1),
    Flag(name="generator_pp", doc="how many are the generator's, where there is one.", default=1),
    Flag(
        name="together", doc="Ranks wait for each other in every op, as in one program over all of them.", default=False
    ),
    Flag(name="json", doc="The order as one line of JSON instead of a summary of all methods.", default=False),
)
_SCHEDULES = [name for name in SCHEDULES if name not in OFFLOADING]


@dataclass(frozen=True, kw_only=True)
class SampleCosts:
    """The costs in a file.

    Attributes:
      samples: costs of forward and backward of each sample [S, 2], by module: "encoder", and "generator" if there is
        one; in the unit of time of the file.
      llm: costs of forward and backward of a microbatch in one stage of the LLM.
    """

    samples: Mapping[str, np.ndarray]
    llm: tuple[float, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the order, or a summary of all methods; returns the exit status 0.

    Args:
      argv: the arguments, without the program's name, such as ["--costs=costs.json", "--microbatches=8"]; by default
        this process's.

    Raises:
      SystemExit: with status 2, after a line on stderr about a wrong flag or file.
    """
    with one_line_errors():
        values = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, USAGE).values
        numbers = {
            name: _count(values, name) for name in ("dp", "pp", "microbatches", "chunks", "encoder_pp", "generator_pp")
        }
        method = str(values["method"])
        one_of("--method", method, METHODS)
        one_of("--schedule", str(values["schedule"]), _SCHEDULES)
        one_of("--inner", str(values["inner"]), INNER)
        costs = read_costs(Path(str(values["costs"])))
        schedule, inner = str(values["schedule"]), str(values["inner"])
        pipeline = _pipeline(costs, numbers, schedule, inner, together=bool(values["together"]))
    if values["json"]:
        print(json.dumps({"ranks": pipeline.reorder(costs.samples, method)}, separators=(",", ":")))
    else:
        print(summary(pipeline, costs.samples))
    return 0


def summary(pipeline: Pipeline, seconds: Mapping[str, np.ndarray]) -> str:
    """A table of every method's largest load and simulated makespan, their lower bounds, and the gain over "none".

    Args:
      pipeline: a `Pipeline` of `mmjax.data.reorder`, that of all dp ranks, with S samples.
      seconds: costs of forward and backward of each sample [S, 2], by module ("encoder", "generator"), such as
        `read_costs(path).samples`.

    Returns:
      Lines joined by newlines: two of headings, one for each of `METHODS`, and one of bounds.
    """
    ranks, rows = len(pipeline.rows), pipeline.rows[0]
    lines = [
        f"{pipeline.samples} samples, {ranks} dp ranks, {pipeline.microbatches} microbatches, {rows} samples in each"
        + (f", units of {pipeline.units.size}" if pipeline.units.size > 1 else ""),
        f"{'method':10} {'largest load':>14} {'makespan':>14} {'over bound':>11} {'none / it':>10}",
    ]
    bound, baseline = pipeline.bound(seconds), 0.0
    for method in METHODS:
        order = pipeline.reorder(seconds, method)
        load, span = pipeline.loads(seconds, order).sum(axis=1).max(), pipeline.makespan(seconds, order)
        over = f"{100 * (span / bound - 1):.2f} %" if bound else "-"
        baseline = baseline or span  # the first method is "none"
        gain = f"{baseline / span:.3f} ×" if span else "-"
        lines.append(f"{method:10} {load:14.6g} {span:14.6g} {over:>11} {gain:>10}")
    lines.append(f"{'bound':10} {pipeline.least_load(seconds):14.6g} {bound:14.6g}")
    return "\n".join(lines)


# ---- the file --------------------------------------------------------------------------------------------------------


def read_costs(path: Path) -> SampleCosts:
    """Reads the costs in a JSON file: {"encoder": [[1.0, 2.0], [0.5, 1.0]], "llm": [1.0, 2.0]}.

    The result has `samples`, arrays [S, 2] by module, here {"encoder": …}, and `llm`, here (1.0, 2.0). A file may have
    "generator" as it has "encoder".

    Raises:
      ConfigError: the file cannot be read or has another form; the line names the place.
    """
    flag = f"--costs={path}"
    try:
        data = parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{flag}: {(error.strerror or str(error)).lower()}; name a JSON file") from None
    except ValueError as error:
        raise ConfigError(f"{flag} is {error}; write {_EXAMPLE}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{flag} holds a {type(data).__name__}; write {_EXAMPLE}")
    if unknown := sorted(set(data) - {ENCODER, LLM, GENERATOR}):
        raise ConfigError(f"{flag}: {unknown[0]!r} is no key; use {ENCODER!r}, {LLM!r} and maybe {GENERATOR!r}")
    for name in (ENCODER, LLM):
        if name not in data:
            raise ConfigError(f"{flag}: {name!r} is missing; write {_EXAMPLE}")
    samples = {name: _samples(flag, name, data[name]) for name in (ENCODER, GENERATOR) if name in data}
    counts = {name: len(costs) for name, costs in samples.items()}
    if len(set(counts.values())) > 1:
        different = " and ".join(f"{count} in {name!r}" for name, count in counts.items())
        raise ConfigError(f"{flag}: {different} are not the same samples; give each module one pair a sample")
    forward, backward = _pair(flag, LLM, data[LLM])
    return SampleCosts(samples=samples, llm=(forward, backward))


_EXAMPLE = '{"encoder": [[1.0, 2.0], [0.5, 1.0]], "llm": [1.0, 2.0]}'


def _samples(flag: str, name: str, pairs: Any) -> np.ndarray:
    if not isinstance(pairs, list) or not pairs:
        raise ConfigError(f"{flag}: {name!r} is {_brief(pairs)}; give a list with a [forward, backward] pair a sample")
    return np.array([_pair(flag, f"{name}[{i}]", pair) for i, pair in enumerate(pairs)])


def _pair(flag: str, name: str, pair: Any) -> tuple[float, float]:
    if isinstance(pair, list) and len(pair) == 2 and all(_is_cost(value) for value in pair):
        return float(pair[0]), float(pair[1])
    raise ConfigError(f"{flag}: {name!r} is {_brief(pair)}; give two numbers from 0 to 1e30, such as [1.0, 2.0]")


def _is_cost(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= 1e30


def _brief(data: Any) -> str:
    text = json.dumps(data)
    return text if len(text) <= 40 else f"{text[:37]}..."


# ---- the pipeline ----------------------------------------------------------------------------------------------------


def _count(values: Mapping[str, str | int | bool], name: str) -> int:
    value = int(values[name])
    if value < 1:
        raise ConfigError(f"--{name}={value}: must be at least 1")
    return value


def _pipeline(costs: SampleCosts, numbers: Mapping[str, int], schedule: str, inner: str, *, together: bool) -> Pipeline:
    samples, microbatches = len(costs.samples[ENCODER]), numbers["microbatches"]
    generator = numbers["generator_pp"] if GENERATOR in costs.samples else 0
    if samples % microbatches:
        legal = max(n for n in range(1, microbatches) if samples % n == 0)
        raise ConfigError(f"--microbatches={microbatches}: must divide the {samples} samples; use {legal}")
    rows, dp = samples // microbatches, numbers["dp"]
    if rows % dp:
        legal = max(n for n in range(1, min(rows, dp) + 1) if rows % n == 0)
        raise ConfigError(f"--dp={dp}: must divide the {rows} samples of a microbatch; use {legal}")
    if schedule not in SURROUNDING and inner != ONE_F_ONE_B:
        raise ConfigError(f"--inner={inner}: is for --schedule={' or '.join(SURROUNDING)}; set it to {ONE_F_ONE_B}")
    if numbers["chunks"] > 1 and not combined(schedule, inner).chunks:
        raise ConfigError(f"--chunks={numbers['chunks']}: is for --schedule=interleaved; set it to 1")
    llm = _llm_stages(numbers, generator, nested=schedule in NESTING)
    chain = Chain(
        encoder=numbers["encoder_pp"],
        llm=llm,
        generator=generator,
        chunks=numbers["chunks"],
        schedule=schedule,
        inner=inner,
        forward=costs.llm[0],
        backward=costs.llm[1],
    )
    try:
        return chain.pipeline(samples=samples, microbatches=microbatches, dp=dp, together=together)
    except ScheduleError as error:
        raise ConfigError(f"--schedule={schedule}: {error}") from None


def _llm_stages(numbers: Mapping[str, int], generator: int, *, nested: bool) -> int:
    """The number of the LLM's stages beside `generator` stages of the generator."""
    pp, encoder = numbers["pp"], numbers["encoder_pp"]
    if nested:
        for name, stages in (("encoder_pp", encoder), ("generator_pp", generator)):
            if stages > 1:
                raise ConfigError(
                    f"--{name}={stages}: a nested module is one stage on all of the --pp ranks; set it to 1"
                )
        return pp
    if pp <= encoder + generator:
        least = encoder + generator + 1
        raise ConfigError(f"--pp={pp}: leaves no stage for the LLM; use {least} or more, or less for the other modules")
    return pp - encoder - generator


if __name__ == "__main__":
    run_plain(main)
