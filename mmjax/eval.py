"""`python -m mmjax.eval --run_dir=D [--data=FOLDER] [--json]`: evaluates what a trained model reads, hears and draws.

The run's parameters are read into any layout; the optimizer's moments stay on disk.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmjax.config import Config, load_run_config
from mmjax.config.flags import PROCESS_FLAGS, Flag, join_processes, one_line_errors, parse_flags, run_command
from mmjax.configurable import ConfigError
from mmjax.flags import importing

if TYPE_CHECKING:  # see `importing`
    from mmjax.data.types import Sample
    from mmjax.run.evaluation import Evaluation

FLAGS = (
    Flag(name="run_dir", doc="the directory of a training run.", required=True),
    Flag(name="data", doc="a folder with images and a data.jsonl of images, question, answer; else held-out samples."),
    Flag(name="source", doc="the one of the run's Data.sources that --data is read like, where they differ."),
    Flag(name="samples", doc="how many; 0 takes Train.eval_samples, or the whole folder.", default=0),
    Flag(name="json", doc="prints one line of JSON.", default=False),
    Flag(name="out", doc="a directory for predictions.png and predictions.jsonl."),
)
USUAL_SAMPLES = 180
DRAWN = 24


@dataclass(frozen=True)
class EvalReport:
    """The results of an evaluation.

    Attributes:
      step: the checkpoint's step.
      samples: the samples that were asked.
      evaluation: the answers and their scores.
      swapped: the scores with the media of one encoder exchanged between samples, by encoder, where they can be.
    """

    step: int
    samples: Sequence[Sample]
    evaluation: Evaluation
    swapped: Mapping[str, Evaluation]

    def numbers(self) -> dict[str, Any]:
        """All figures, by the names of `eval.jsonl`."""
        from mmjax.run.evaluation import figures

        return {"step": self.step, "samples": len(self.samples)} | figures(self.evaluation, self.swapped)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates the newest checkpoint of a run; returns the exit status."""
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, (*FLAGS, *PROCESS_FLAGS), "python -m mmjax.eval")
        run_dir, data, count = str(flags.values["run_dir"]), str(flags.values["data"]), int(flags.values["samples"])
        if count < 0:
            raise ConfigError(f"--samples={count}: must be 0 or more, such as {USUAL_SAMPLES}")
        config = load_run_config(run_dir, flags.gin_files, flags.bindings, allow_code=flags.allow_code)
        source = str(flags.values["source"])
        if source and not data:
            raise ConfigError(f"--source={source!r}: only a folder is read like a source; add --data or leave it out")
        if data:
            _require_data(Path(data))
        out = _made(str(flags.values["out"])) if flags.values["out"] else None
        join_processes(flags)
        found = evaluate(config, run_dir, data, count, source=source)
        if out:
            _write(out, found)
        numbers = found.numbers()
        if flags.values["json"]:
            print(json.dumps(numbers))
        else:
            folder = data or (config.data.folder if config.data.task == "folder" else "")
            what = f"samples of {folder}" if folder else "held-out samples"
            from mmjax.run.evaluation import show

            print(f"{run_dir} after step {numbers.pop('step')}: {numbers.pop('samples')} {what}")
            for name, value in numbers.items():
                print(f"{name:<36}{show(name, value)}")
    return 0


def _require_data(folder: Path) -> None:
    """Raises ConfigError unless the folder has data; called early, since a model takes seconds to build."""
    if not folder.is_dir():
        raise ConfigError(f"--data='{folder}' is no directory: name one with images and a data.jsonl")
    from mmjax.data.sources.datasets import data_file

    data_file(str(folder), "--data")


def evaluate(
    config: Config, run_dir: str | Path, data: str = "", count: int = 0, style: str = "auto", source: str = ""
) -> EvalReport:
    """Answers of the newest readable checkpoint of `run_dir` to held-out samples, or to those of the folder `data`.

    Args:
      config: the run's, under any layout; see `load_run_config`.
      run_dir: the run's directory.
      data: a folder of images with a data.jsonl; empty for held-out samples.
      count: how many samples; 0 for as many as the run evaluates, or the whole folder.
      style: the style of the progress display; see `Progress`.
      source: the source of the run whose template and preprocessing the folder's samples get, where these differ.

    Raises:
      ConfigError: there is no checkpoint, or the folder or the devices do not fit.
      CheckpointError: the checkpoint is of another model.
    """
    with importing():
        from mmjax.data.sample import meta_of
        from mmjax.pipeline.compile import compile_all
        from mmjax.run.asked import for_folder
        from mmjax.run.assembly import place
        from mmjax.run.data_state import known_in
        from mmjax.run.evaluation import (
            Evaluator,
            as_evaluated,
            exchanged,
            held_out,
            load_parameters,
            require_checkpoint,
            room_for,
            score,
        )
        from mmjax.run.progress import Progress

    require_checkpoint(run_dir)
    config = known_in(as_evaluated(config), run_dir)
    if data:
        config = for_folder(config, data, source)
    samples = held_out(config, count or (sys.maxsize if data else config.train.eval_samples or USUAL_SAMPLES))
    parts = place(config)
    step, states = load_parameters(parts, run_dir)
    swapped = {} if data else exchanged(config, parts.tokenizer, samples)
    asked = [*samples, *(sample for other in swapped.values() for sample in other)]
    metas = [meta_of(sample, parts.packer.encoders) for sample in asked]
    evaluator = Evaluator(parts, room=room_for(metas, parts.packer.sequence_length))
    programs = evaluator.predictor.programs()
    with Progress(len({id(p) for p in programs}), "compiling programs", log_every=len(programs), style=style) as bar:
        compile_all(programs, lambda done, _, __: bar.update(done))
    with Progress(len(asked), "answering", log_every=len(asked), style=style) as bar:
        answers = evaluator.answers(states, asked, bar.update)
    drawings, loss = evaluator.drawings(states, samples), evaluator.loss(states, samples)
    # As many answers for each encoder as there are samples.
    cut = [answers[at : at + len(samples)] for at in range(0, len(asked), len(samples))]
    task = config.data.origin
    other = {name: score(own, said, task=task) for (name, own), said in zip(swapped.items(), cut[1:], strict=True)}
    return EvalReport(step, samples, score(samples, cut[0], drawings, loss, task), other)


def _made(out: str) -> Path:
    """The directory `out`, made before the evaluation, so that a failure does not waste it. Raises ConfigError."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = f"name another path, such as {Path(out).name or 'answers'!r}"
        raise ConfigError(f"--out={out!r}: cannot be made ({error.strerror}); {fix}") from None
    return Path(out)


def _write(folder: Path, report: EvalReport) -> None:
    from mmjax.run.evaluation import draw_answers

    rows = [
        {"question": sample.question, "answer": sample.answer, "predicted": answer}
        for sample, answer in zip(report.samples, report.evaluation.answers, strict=True)
    ]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (folder / "predictions.jsonl").write_text("".join(lines), encoding="utf-8")
    found = report.evaluation
    sheet = folder / "predictions.png"
    draw_answers(report.samples[:DRAWN], found.answers[:DRAWN], sheet, drawings=found.drawings[:DRAWN])


if __name__ == "__main__":
    run_command(main)
