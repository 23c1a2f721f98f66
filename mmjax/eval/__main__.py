"""`python -m mmjax.eval --run_dir=D [--data=FOLDER] [--json]`: scores a trained model's answers and drawings.

The run's parameters are read into any layout; the optimizer's moments stay on disk.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mmjax.config import load_run_config
from mmjax.config.flags import PROCESS_FLAGS, Flag, join_processes, one_line_errors, parse_flags, run_command
from mmjax.configurable import ConfigError
from mmjax.eval.report import USUAL_SAMPLES, EvalReport, evaluate
from mmjax.recipe import Recipe

FLAGS = (
    Flag(name="run_dir", doc="the directory of a training run.", required=True),
    Flag(name="data", doc="a folder with images and a data.jsonl of images, question, answer; else held-out samples."),
    Flag(name="source", doc="the one of the run's Data.sources that --data is read like, where they differ."),
    Flag(name="samples", doc="how many; 0 takes Train.eval_samples, or the whole folder.", default=0),
    Flag(name="json", doc="prints one line of JSON.", default=False),
    Flag(name="out", doc="a directory for predictions.png, drawings.png and predictions.jsonl."),
)
DRAWN = 24


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates the newest checkpoint of a run, and prints the scores; returns the exit status, 0.

    Args:
      argv: the arguments without the program's name, such as ["--run_dir=runs/a"]; by default those of this process.

    Raises:
      SystemExit: 2 after a mistake, with one line on stderr; 130 after Ctrl-C or SIGTERM; 0 after --help.
    """
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, (*FLAGS, *PROCESS_FLAGS), "python -m mmjax.eval")
        run_dir, data, count = str(flags.values["run_dir"]), str(flags.values["data"]), int(flags.values["samples"])
        if count < 0:
            raise ConfigError(f"--samples={count}: must be 0 or more, such as {USUAL_SAMPLES}")
        recipe = load_run_config(run_dir, flags.gin_files, flags.bindings, allow_code=flags.allow_code)
        source = str(flags.values["source"])
        if source and not data:
            raise ConfigError(f"--source={source!r}: only a folder is read like a source; add --data or leave it out")
        if data:
            _require_data(Path(data))
        out = _made_folder(str(flags.values["out"])) if flags.values["out"] else None
        join_processes(flags)
        report = evaluate(recipe, run_dir, data, count, source=source)
        if out:
            _write(out, report, recipe)
        numbers = report.numbers()
        if flags.values["json"]:
            print(json.dumps(numbers))
        else:
            folder = data or (recipe.data.settings.folder if recipe.data.settings.task == "folder" else "")
            samples = f"samples of {folder}" if folder else "held-out samples"
            from mmjax.eval.scores import show

            print(f"{run_dir} after step {numbers.pop('step')}: {numbers.pop('samples')} {samples}")
            for name, value in numbers.items():
                print(f"{name:<36}{show(name, value)}")
    return 0


def _require_data(folder: Path) -> None:
    """Raises ConfigError unless the folder has data; called early, since a model takes seconds to build."""
    if not folder.is_dir():
        raise ConfigError(f"--data='{folder}' is no directory: name one with images and a data.jsonl")
    from mmjax.data.sources.datasets import data_file

    data_file(str(folder), "--data")


def _made_folder(out: str) -> Path:
    """The directory `out`, made before the evaluation, so that a failure does not waste it. Raises ConfigError."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = f"name another path, such as {Path(out).name or 'answers'!r}"
        raise ConfigError(f"--out={out!r}: cannot be made ({error.strerror}); {fix}") from None
    return Path(out)


def _write(folder: Path, report: EvalReport, recipe: Recipe) -> None:
    """Writes questions and answers as JSONL, and a picture of the first of them."""
    from mmjax.assembly.latents import Decoders
    from mmjax.viz.answers import draw_answers
    from mmjax.viz.grid import draw_grid, pairs_of

    rows = [
        {"question": sample.question, "answer": sample.answer, "predicted": answer}
        for sample, answer in zip(report.samples, report.evaluation.answers, strict=True)
    ]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (folder / "predictions.jsonl").write_text("".join(lines), encoding="utf-8")
    answers, drawings = report.evaluation.answers[:DRAWN], report.evaluation.drawings[:DRAWN]
    shown, drawings = Decoders.of(recipe).shown(report.samples[:DRAWN], drawings)
    draw_answers(shown, answers, folder / "predictions.png", drawings=drawings)
    if pairs := pairs_of(shown, drawings):
        draw_grid(pairs, folder / "drawings.png")


if __name__ == "__main__":
    run_command(main)
