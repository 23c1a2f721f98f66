"""Evaluation by free-running greedy decoding: what the model answers, and what when its media are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mmjax.checkpoint import Checkpointer
from mmjax.config import Config
from mmjax.configurable import ConfigError
from mmjax.data.config import PackingConfig
from mmjax.data.recognise import read_drawing
from mmjax.data.sample import meta_of, prompt_only, swap_media
from mmjax.data.tokenizer import Tokenizer, make_tokenizer
from mmjax.data.types import Sample
from mmjax.mesh.layout import cell_count
from mmjax.models.multimodal import LLM
from mmjax.pipeline.predict import Predictor
from mmjax.pipeline.stage_state import State
from mmjax.run.assembly import build_packer, open_source, signed
from mmjax.run.model import encoder_specs
from mmjax.run.parts import Placement
from mmjax.run.pictures import Prediction, as_image, draw_predictions

Drawings = Mapping[str, tuple[np.ndarray, ...]]
"""Of a sample, by generator: media [h, w, C] with values as they are learned."""


@dataclass(frozen=True)
class Evaluation:
    """What came out.

    Attributes:
      answers: what the model said, by sample.
      exact_match: share of samples whose answer is right to the letter.
      digit_accuracy: share of the right answers' characters that the model gave at their place.
      kinds: exact match by kind of question, where the samples say kinds.
      drawings: by sample, what each generator drew, where something was asked for.
      drawing_accuracy: share of the digits to be drawn that are recognised in the drawings; ``None`` without any.
    """

    answers: tuple[str, ...]
    exact_match: float
    digit_accuracy: float
    kinds: Mapping[str, float] = field(default_factory=dict)
    drawings: tuple[Drawings, ...] = ()
    drawing_accuracy: float | None = None


def score(samples: Sequence[Sample], answers: Sequence[str], drawings: Sequence[Drawings] = ()) -> Evaluation:
    """Compares answers with the samples'; a missing or superfluous character shifts nothing.

    ``drawings`` are of digits, if there are any.
    """
    right = [a == s.answer for s, a in zip(samples, answers, strict=True)]
    total = sum(len(s.answer) for s in samples)
    found = sum(x == y for s, a in zip(samples, answers, strict=True) for x, y in zip(s.answer, a, strict=False))
    by_kind: dict[str, list[bool]] = {}
    for sample, ok in zip(samples, right, strict=True):
        if sample.kind:
            by_kind.setdefault(sample.kind, []).append(ok)
    kinds = {kind: sum(own) / len(own) for kind, own in sorted(by_kind.items())}
    exact, digits = sum(right) / max(1, len(samples)), found / max(1, total)
    return Evaluation(tuple(answers), exact, digits, kinds, tuple(drawings), _recognised(samples, drawings))


def _recognised(samples: Sequence[Sample], drawings: Sequence[Drawings]) -> float | None:
    pairs = [
        (label, read_drawing(drawing, len(label)))
        for sample, drawn in zip(samples, drawings, strict=bool(drawings))
        for name, own in drawn.items()
        for label, drawing in zip(sample.labels.get(name, ()), own, strict=False)
    ]
    total = sum(len(label) for label, _ in pairs)
    return sum(a == b for pair in pairs for a, b in zip(*pair, strict=True)) / total if total else None


def figures(plain: Evaluation, swapped: Mapping[str, Evaluation]) -> dict[str, Any]:
    """An evaluation by the names of `eval.jsonl`; `swapped` by the encoder whose media were exchanged."""
    row: dict[str, Any] = {"exact_match": plain.exact_match}
    for prefix, found in (("", plain), *((f"swapped_{encoder}_", found) for encoder, found in swapped.items())):
        row[f"{prefix}digit_accuracy"] = found.digit_accuracy
        if len(found.kinds) > 1:
            row[f"{prefix}kinds"] = dict(found.kinds)
    return row | ({} if plain.drawing_accuracy is None else {"drawing_accuracy": plain.drawing_accuracy})


def show_kinds(kinds: Mapping[str, float]) -> str:
    """Such as "hear 0.95, read 0.9"."""
    return ", ".join(f"{kind} {value:.3f}" for kind, value in kinds.items())


def held_out(config: Config, count: int) -> list[Sample]:
    """The first `count` evaluation samples, the same in every run of a configuration; fewer where there are fewer.

    Those that cannot be read are left out, unless there are no others: there is nothing to answer.
    """
    source = open_source(config, split="test")
    if isinstance(source, Sized):
        count = min(count, len(source))
    samples = [source.sample(index) for index in range(count)]
    return [sample for sample in samples if sample.loss_weights.any()] or samples


def exchanged(config: Config, tokenizer: Tokenizer, samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """By encoder, the samples with its media exchanged; none where they cannot be: a folder's fit no bound if mixed."""
    if config.data.sources or config.data.task != "digits" or len(samples) < 2:
        return {}
    specs, names = encoder_specs(config), dict.fromkeys(name for sample in samples for name in sample.media_tokens)
    return {name: swap_media(tokenizer, specs, samples, name) for name in names if not specs[name].drawn}


def draw_answers(
    samples: Sequence[Sample],
    answers: Sequence[str],
    path: str | Path | None = None,
    *,
    title: str = "",
    drawings: Sequence[Drawings] = (),
) -> Figure:
    """Draws samples, their media beside question, answer and prediction; also to `path` where one is given.

    Behind a sample's media is what the model drew for it, where `drawings` are given.
    """
    items = [
        Prediction(
            images=(*_shown(sample), *(as_image((one + 1) / 2) for own in drawn.values() for one in own)),
            question=sample.question,
            answer=sample.answer,
            predicted=answer,
            ok=answer == sample.answer,
        )
        for sample, answer, drawn in zip(samples, answers, drawings or [{}] * len(samples), strict=True)
    ]
    return draw_predictions(items, path, title=title)


def _shown(sample: Sample) -> list[np.ndarray]:
    """What is seen and heard, and not what is to be drawn."""
    return [as_image(medium) for name, own in sample.media.items() if name not in sample.noise for medium in own]


def for_folder(config: Config, folder: str) -> Config:
    """The configuration under which the samples of `folder` are read.

    Shapes stay the run's (whose programs are compiled already) while the samples fit into them; otherwise a cell holds
    one sample, and rows and buckets are the largest sample's.

    Raises:
      ConfigError: the folder has no data.jsonl, or something in it cannot be read.
    """
    data = replace(config.data, sources={}, task="folder", folder=folder)
    worst = open_source(replace(config, data=data), split="test").worst_case()
    data = replace(data, sequence_length=max(data.sequence_length, worst.tokens))
    try:
        run = build_packer(config, _tokenizer(config))
        packing = {name: PackingConfig(buckets=spec.buckets) for name, spec in run.encoders.items()}
        wanted = replace(config, data=data, packing={**config.packing, **packing})
        build_packer(wanted, _tokenizer(config))
        return wanted
    except ConfigError:  # an image is larger than the run's, or the run's own folder is gone
        rows = cell_count(config.layouts.values())
        train = replace(config.train, global_batch=rows, microbatches=1)
        return replace(config, data=data, packing=dict.fromkeys(config.packing, PackingConfig()), train=train)


def with_room(config: Config) -> Config:
    """The configuration with buckets that hold its data: those given are for the cells of one layout."""
    try:
        build_packer(config, _tokenizer(config))
        return config
    except ConfigError:
        return replace(config, packing=dict.fromkeys(config.packing, PackingConfig()))


def _tokenizer(config: Config) -> Tokenizer:
    return make_tokenizer(config.data.tokenizer, config.model.media)


def require_checkpoint(run_dir: str | Path) -> None:
    """Raises `ConfigError` where `run_dir` has no checkpoint, before any device is touched."""
    if not any((Path(run_dir) / "checkpoints").glob("[0-9]*")):
        raise ConfigError(
            f"--run_dir={str(run_dir)!r} has no checkpoint yet: train with --gin_file={Path(run_dir) / 'config.gin'}"
        )


def load_parameters(parts: Placement, run_dir: str | Path) -> tuple[int, Mapping[str, State]]:
    """Step and parameters of the newest readable checkpoint of `run_dir`, by stage on its devices.

    Raises:
      ConfigError: there is none.
      CheckpointError: it is of another model.
    """
    stages = parts.placed.stages.values()
    avals = {name: aval for stage in stages for name, aval in stage.state.logical_avals().items()}
    targets = {name: aval for name, aval in avals.items() if name.startswith("params/")}
    restored = Checkpointer(Path(run_dir) / "checkpoints").restore_latest(targets, prefix="params/")
    if restored is None:
        raise ConfigError(f"--run_dir={str(run_dir)!r} has no checkpoint yet: train with its config.gin")
    local = parts.placed.local_stages
    return restored.step, {n: stage.state.parameters_from_logical(restored.leaves) for n, stage in local.items()}


class Evaluator:
    """Decodes samples with the parameters of a run, on the run's devices."""

    def __init__(self, parts: Placement):
        """Traces the forward programs for the run's microbatch shapes."""
        self.parts, packer = parts, parts.packer
        # A row for each prompt, with room behind it.
        shapes = {s: i for s, i in parts.shapes.items() if not packer.text or dict(s)[LLM] == packer.widest}
        self.rows = next(iter(shapes.values()))[LLM]["tokens"].shape[0]
        self.predictor = Predictor(parts.placed, shapes, packer.microbatches)

    @property
    def samples_per_call(self) -> int:
        """How many samples are decoded side by side."""
        return self.rows * self.parts.packer.microbatches

    def answers(
        self, states: Mapping[str, State], samples: Sequence[Sample], report: Callable[[int], None] | None = None
    ) -> list[str]:
        """The model's answer to each sample's last question; ``report`` hears how many are answered."""
        result: list[str] = []
        # One token more than the longest right answer; of all samples, so that no answer depends on its neighbours.
        limit = 1 + max((len(self.parts.tokenizer.encode(sample.answer)) for sample in samples), default=0)
        self.predictor.load(states)
        try:
            for first in range(0, len(samples), self.samples_per_call):
                result += self._call(samples[first : first + self.samples_per_call], limit)
                if report:
                    report(len(result))
        finally:
            self.predictor.unload()
        return result

    def evaluate(
        self, states: Mapping[str, State], samples: Sequence[Sample], check: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """Answers, drawings and their scores; ``check`` is called after each round of decoding, and may raise."""
        answers = self.answers(states, samples, lambda _: check())
        return score(samples, answers, self.drawings(states, samples, lambda _: check()))

    def drawings(
        self, states: Mapping[str, State], samples: Sequence[Sample], report: Callable[[int], None] = lambda done: None
    ) -> list[Drawings]:
        """What the generators draw for each sample that has noise; ``report`` hears how many samples are done."""
        result: list[Drawings] = [{} for _ in samples]
        asked = [index for index, sample in enumerate(samples) if sample.noise]
        self.predictor.load(states)
        try:
            for first in range(0, len(asked), self.samples_per_call):
                own = asked[first : first + self.samples_per_call]
                for index, drawn in zip(own, self._draw([samples[index] for index in own]), strict=True):
                    result[index] = drawn
                report(first + len(own))
        finally:
            self.predictor.unload()
        return result

    def _draw(self, samples: Sequence[Sample]) -> list[Drawings]:
        packer, model, batch, plans = self.parts.packer, self.parts.placed.model, [], []
        prompts = [prompt_only(_from_noise(sample)) for sample in samples]
        largest = {name: len(packer.encoders[name].buckets) - 1 for name in model.generators}
        for index in range(packer.microbatches):
            part = prompts[index * self.rows : (index + 1) * self.rows]
            plans.append(
                packer.plan_microbatch([meta_of(one, packer.encoders) for one in part], self.rows, largest, apart=True)
            )
            batch.append(signed(packer.fill(plans[-1], dict(enumerate(part)))))
        result: list[dict[str, tuple[np.ndarray, ...]]] = [{} for _ in samples]
        for name, drawn in self.predictor.draw(batch).items():
            for index, (plan, patches) in enumerate(zip(plans, drawn, strict=True)):
                for sample, media in packer.media(name, plan, patches).items():
                    result[index * self.rows + sample][name] = media
        return [*result]

    def _call(self, samples: Sequence[Sample], limit: int) -> list[str]:
        tokenizer, packer = self.parts.tokenizer, self.parts.packer
        prompts = [prompt_only(sample) for sample in samples]
        batch, starts = [], []
        for index in range(packer.microbatches):
            part = prompts[index * self.rows : (index + 1) * self.rows]
            batch.append(signed(packer.microbatch(part, self.rows, apart=True)))
            lengths = [len(prompt.tokens) for prompt in part]
            starts.append(np.asarray(lengths + [0] * (self.rows - len(part))))
        generated = self.predictor.generate(batch, starts, limit, tokenizer.eos)
        flat = [row for rows in generated for row in rows]
        # Rows fill microbatches in order, so the first len(samples) rows are the samples'.
        return [tokenizer.decode(tokens) for tokens in flat[: len(samples)]]


def _from_noise(sample: Sample) -> Sample:
    """The sample with nothing to be seen of what is to be drawn."""
    return replace(sample, times={name: (1.0,) * len(own) for name, own in sample.times.items()})
