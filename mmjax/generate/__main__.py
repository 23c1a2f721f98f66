"""`python -m mmjax.generate --run_dir=D --messages=FILE`: answers messages with a model, or by pictures or sound.

The model is a run's, or that of a folder as save_pretrained writes it (`--weights=DIR`); nothing is trained, and no
training data are read.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmjax.config import load_config, load_run_config
from mmjax.config.flags import (
    PROCESS_FLAGS,
    Flag,
    Flags,
    join_processes,
    one_line_errors,
    parse_flags,
    process_settings,
    run_command,
)
from mmjax.config.from_folder import TOKENIZER, folder_bindings
from mmjax.configurable import ConfigError, not_negative, positive, require
from mmjax.data.messages import Dialogue, parse_messages
from mmjax.data.picture_prompts import MOST_SECONDS, MOST_SIDE, Size, ends_with_picture, with_picture, with_recording
from mmjax.flags import importing
from mmjax.generate.answers import Answer, generate
from mmjax.generate.pictures import draw_pictures, with_drawing, write_pictures
from mmjax.mesh import process_group
from mmjax.pipeline.config import Sampling
from mmjax.recipe import Recipe

FLAGS = (
    Flag(name="run_dir", doc="the directory of a training run; or name --weights."),
    Flag(name="weights", doc="a folder of a whole model as save_pretrained writes it, such as LLaVA's."),
    Flag(name="messages", doc="a file of messages, or - for standard input: JSON, or JSONL of several.", required=True),
    Flag(name="max_tokens", doc="the most tokens of an answer.", default=64),
    Flag(name="temperature", doc="what logits are divided by; 0 takes the likeliest token.", default="0"),
    Flag(name="top_p", doc="chooses among the likeliest tokens that make up this probability together.", default="1"),
    Flag(name="seed", doc="of random numbers: the same text under any layout.", default=0),
    Flag(name="source", doc="the one of the run's Data.sources that messages are read like, where they differ."),
    Flag(
        name="json", doc='prints {"text", "tokens", "logprobs", "pictures"} for each prompt in one line.', default=False
    ),
    Flag(
        name="out",
        doc="a directory for pictures, <prompt>-<sample>.png, and recordings, .wav, where messages end with some to be "
        "made.",
    ),
    Flag(name="generate_size", doc="height and width of a picture to be made of each message, such as 64x64."),
    Flag(name="generate_seconds", doc="seconds of a recording to be made of each message, such as 1.5."),
    Flag(name="samples", doc="pictures or recordings of each prompt, from different noise.", default=1),
    Flag(name="steps", doc="steps from noise to a picture or a recording; 0 takes the run's.", default=0),
    Flag(name="guidance", doc="the share of the prompt in each step; without it the run's."),
    Flag(name="sampler", doc="the method of drawing, such as 'euler', 'ddim' or 'dpm++'; without it the run's."),
)
USAGE = "python -m mmjax.generate"


def main(argv: Sequence[str] | None = None) -> int:
    """Answers messages, and prints the answers; returns the exit status, 0.

    Args:
      argv: the arguments without the program's name, such as ["--run_dir=runs/a", "--messages=messages.json"]; by
        default those of this process.

    Raises:
      SystemExit: 2 after a mistake, with one line on stderr; 130 after Ctrl-C or SIGTERM; 0 after --help.
    """
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, (*FLAGS, *PROCESS_FLAGS), USAGE)
        run_dir, weights = str(flags.values["run_dir"]), str(flags.values["weights"])
        path, source = str(flags.values["messages"]), str(flags.values["source"])
        sampling, limit = _sampling(flags), int(flags.values["max_tokens"])
        positive("--max_tokens", limit, 64)
        named = f"--messages={path!r}"
        if path == "-":
            _require_alone(flags, named)
        dialogues = parse_messages(_text(path, named), named)
        if size := _size(str(flags.values["generate_size"])):
            dialogues = [with_picture(dialogue, size) for dialogue in dialogues]
        if seconds := _seconds(flags):
            dialogues = [with_recording(dialogue, seconds) for dialogue in dialogues]
        draws = _require_pictures(flags, dialogues, named)
        recipe = _recipe(flags, run_dir, weights)
        if draws:
            return _draw(flags, recipe, dialogues, named)
        join_processes(flags)
        printer = None if flags.values["json"] else _Printer(len(dialogues))
        answers = generate(
            recipe,
            run_dir,
            dialogues,
            media=_media_folder(path),
            limit=limit,
            sampling=sampling,
            source=source,
            named=named,
            on_token=printer,
        )
        with importing():
            from mmjax.mesh.processes import is_first
        if printer is None and is_first():
            for answer in answers:
                print(_line(answer, []))
    return 0


def _draw(flags: Flags, recipe: Recipe, dialogues: Sequence[Dialogue], named: str) -> int:
    """Makes pictures of messages, writes and names them; returns the exit status, 0."""
    recipe, out = with_drawing(recipe, **_drawing(flags)), Path(str(flags.values["out"]))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out={str(out)!r}: cannot be made ({error.strerror}); name another path") from None
    join_processes(flags)
    pictures = draw_pictures(
        recipe,
        str(flags.values["run_dir"]),
        dialogues,
        media=_media_folder(str(flags.values["messages"])),
        samples=int(flags.values["samples"]),
        seed=int(flags.values["seed"]),
        source=str(flags.values["source"]),
        named=named,
    )
    with importing():
        from mmjax.mesh.processes import is_first
    if is_first():
        for by_sample in write_pictures(out, pictures):
            paths = [path for of_sample in by_sample for path in of_sample]
            print(_line(Answer("", (), ()), paths) if flags.values["json"] else "\n".join(paths))
    return 0


def _line(answer: Answer, pictures: Sequence[str]) -> str:
    values = {"text": answer.text, "tokens": answer.tokens, "logprobs": answer.logprobs, "pictures": pictures}
    return json.dumps(values)


def _media_folder(path: str) -> str:
    """The folder that names of media in the messages start from."""
    return "." if path == "-" else os.path.dirname(path) or "."


def _size(text: str) -> Size | None:
    """Height and width of "64x32"; `None` for ""."""
    if not text:
        return None
    sides = text.lower().split("x")
    legal = len(sides) == 2 and all(side.isdecimal() and 0 < int(side) <= MOST_SIDE for side in sides)
    require(legal, "--generate_size", text, "must be height x width in pixels, such as 64x64")
    return int(sides[0]), int(sides[1])


def _seconds(flags: Flags) -> float:
    """The value of ``--generate_seconds``; 0 without it."""
    text, size = str(flags.values["generate_seconds"]), str(flags.values["generate_size"])
    if not text:
        return 0.0
    require(
        not size, "--generate_size", size, "stands beside --generate_seconds; an answer is a picture or a recording"
    )
    seconds = _number("generate_seconds", text)
    require(0 < seconds <= MOST_SECONDS, "--generate_seconds", text, "must be seconds of a recording, such as 1.5")
    return seconds


def _require_pictures(flags: Flags, dialogues: Sequence[Dialogue], named: str) -> bool:
    """Whether the dialogues end with pictures to be made; raises ConfigError where some do, or flags do not fit."""
    draws = list(map(ends_with_picture, dialogues))
    if any(draws) and not all(draws):
        raise ConfigError(f"{named}: some prompts are answered by text and some by pictures; write a file for each")
    if any(draws):
        require(
            bool(flags.values["out"]),
            "--out",
            "",
            "is missing: messages ask for pictures or recordings; name a directory",
        )
        positive("--samples", int(flags.values["samples"]))
        return True
    defaults = {flag.name: flag.default for flag in FLAGS}
    names = ("out", "samples", "steps", "guidance", "sampler")
    for name in (name for name in names if flags.values[name] != defaults[name]):
        legal = "--generate_size=64x64 or --generate_seconds=1.5"
        fix = f"no message ends with a picture to be made; leave it out, or add {legal}"
        raise ConfigError(f"--{name}={flags.values[name]!r}: {fix}")
    return False


def _drawing(flags: Flags) -> dict[str, Any]:
    """The settings of drawing that flags change."""
    steps, guidance, sampler = (flags.values[name] for name in ("steps", "guidance", "sampler"))
    changes: dict[str, Any] = {"sampler": str(sampler)} if sampler else {}
    if int(steps):
        positive("--steps", int(steps), 20)
        changes["steps"] = int(steps)
    if guidance:
        changes["guidance"] = _number("guidance", str(guidance))
    return changes


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{name}={text}: must be a number, such as 0.7") from None


def _recipe(flags: Flags, run_dir: str, weights: str) -> Recipe:
    """The configuration of a run, or of a folder of weights."""
    if bool(run_dir) == bool(weights):
        problem = f"--weights={weights!r} beside --run_dir" if run_dir else "--run_dir and --weights are missing"
        raise ConfigError(f"{problem}: name one, the directory of a run or a folder as save_pretrained writes it")
    if run_dir:
        return load_run_config(run_dir, flags.gin_files, flags.bindings, allow_code=flags.allow_code)
    recipe = load_config(flags.gin_files, [*folder_bindings(weights), *flags.bindings], allow_code=flags.allow_code)
    named = any(binding.startswith("Data.tokenizer=") for binding in flags.bindings)  # maybe bytes
    fix = f"has no {TOKENIZER}; name one with --gin.Data.tokenizer=FILE"
    require(bool(recipe.data.settings.tokenizer) or named, "--weights", weights, fix)
    return recipe


def _sampling(flags: Flags) -> Sampling:
    numbers = {name: _number(name, str(flags.values[name])) for name in ("temperature", "top_p")}
    not_negative("--temperature", numbers["temperature"])
    require(0 < numbers["top_p"] <= 1, "--top_p", numbers["top_p"], "must be above 0 and at most 1, such as 0.9")
    seed = int(flags.values["seed"])
    require(0 <= seed < 2**32, "--seed", seed, "must be 0 or more and below 2**32, such as 0")
    return Sampling(seed=seed, **numbers)


def _require_alone(flags: Flags, named: str) -> None:
    """Raises ConfigError where several processes would share standard input."""
    if process_group.find_processes(process_settings(flags)):
        raise ConfigError(f"{named}: one process alone can read standard input; name a file that all have")


def _text(path: str, named: str) -> str:
    """The text of the messages."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{named}: is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{named}: cannot be read ({error.strerror}); name a file of messages, or -") from None


class _Printer:
    """Prints texts as they grow, one after another; of several processes, in the first."""

    def __init__(self, count: int):
        self._printed, self._now, self._count = 0, 0, count

    def __call__(self, texts: Sequence[str], complete: Sequence[bool]) -> None:
        from mmjax.mesh.processes import is_first

        if not is_first():
            return
        while self._now < min(len(texts), self._count):
            text, ended = texts[self._now], complete[self._now]
            # The last character may be half of one, whose other bytes come with the next token.
            shown = text if ended else text.rstrip("\N{REPLACEMENT CHARACTER}")
            print(shown[self._printed :], end="\n" if ended else "", flush=True)
            self._printed = max(self._printed, len(shown))
            if not ended:
                return
            self._now, self._printed = self._now + 1, 0


if __name__ == "__main__":
    run_command(main)
