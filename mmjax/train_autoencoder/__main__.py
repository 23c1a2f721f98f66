"""Trains an autoencoder of pictures, whose latents a generator makes.

    python -m mmjax.train_autoencoder --pictures=photos --out=vae --widths=32,64,64 --size=64,64 --steps=2000

All devices of this process share a batch. ``--out`` has a folder of diffusers for each of the last checkpoints, and
``last``, a link to the youngest one. Run again, the command goes on from there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from mmjax.configurable import ConfigError, require
from mmjax.flags import Flag, importing, one_line_errors, parse_flags, run_plain
from mmjax.models.autoencoder.config import AutoencoderConfig
from mmjax.train_autoencoder.settings import Training

USAGE = "python -m mmjax.train_autoencoder"
_OVERRIDES = ("channels", "latent_channels", "widths", "layers", "groups")
FLAGS = (
    Flag(name="out", doc="folder of the run.", required=True),
    Flag(name="pictures", doc="folder of pictures, with the folders in it.", required=True),
    Flag(name="vae", doc="folder of an autoencoder to go on from, as diffusers writes it; '' trains a new one."),
    Flag(name="preset", doc=f"of a new one: {', '.join(AutoencoderConfig.presets)}.", default="tiny"),
    Flag(name="widths", doc="of a new one: channels at each size, such as 32,64,64; each halves the sides."),
    Flag(name="latent_channels", doc="of a new one.", default=0),
    Flag(name="layers", doc="of a new one: residual blocks at each size.", default=0),
    Flag(name="groups", doc="of a new one: groups of a GroupNorm.", default=0),
    Flag(name="channels", doc="of a new one: 3 for colours, 1 for grey.", default=0),
    Flag(name="size", doc="height and width of pictures, which are scaled and cut.", default="256,256"),
    Flag(name="batch", doc="pictures of a step, on all devices together.", default=8),
    Flag(name="steps", doc="steps of the whole run.", default=1000),
    Flag(name="seed", doc="of new parameters, the order of pictures, flips and noise.", default=0),
    Flag(name="error", doc="of a number of a picture: l1 or l2.", default="l1"),
    Flag(name="divergence", doc="weight of the divergence of latents beside the errors' sum.", default="1e-6"),
    Flag(name="flip", doc="mirrors half of the pictures.", default=False),
    Flag(name="learning_rate", doc="of AdamW.", default="1e-4"),
    Flag(name="warmup", doc="steps with a rising learning rate.", default=0),
    Flag(name="schedule", doc="of the learning rate: constant, cosine or linear.", default="constant"),
    Flag(name="clip", doc="the largest norm of the gradient.", default="1.0"),
    Flag(name="held_out", doc="pictures that are not trained on, and whose error is measured.", default=0),
    Flag(name="every", doc="steps between checkpoints.", default=500),
    Flag(name="log_every", doc="steps between lines of metrics.jsonl.", default=10),
)
Values = Mapping[str, str | int | bool]
T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit status 0.

    Args:
      argv: the arguments, without the program's name; by default this process's.

    Raises:
      SystemExit: with status 2, after a line on stderr about what is wrong.
    """
    with one_line_errors("interrupted; run it again to go on from the last checkpoint"):
        values = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, USAGE).values
        for name in _OVERRIDES if values["vae"] else ():
            require(not values[name], f"--{name}", values[name], "--vae decides it; leave it out")
        new = None if values["vae"] else training_of(values, settings_of(values))
        require(int(values["log_every"]) > 0, "--log_every", values["log_every"], "must be above 0, such as 10")
        with importing():
            from mmjax.latents.pictures import Folder
            from mmjax.models.autoencoder.model import Autoencoder
            from mmjax.train_autoencoder.running import Run
        start = Autoencoder.read(str(values["vae"])) if values["vae"] else None
        training = new or training_of(values, start.config, start.identity)  # pyright: ignore
        out, log_every = Path(str(values["out"])), int(values["log_every"])
        records = Folder(str(values["pictures"]))
        print(Run(training=training, records=records, out=out, start=start, log_every=log_every).train())
    return 0


def settings_of(values: Values) -> AutoencoderConfig:
    """The settings of a new autoencoder, by the values of the flags.

    Raises:
      ConfigError: a value is wrong.
    """
    overrides: dict[str, object] = {name: values[name] for name in _OVERRIDES if values[name]}
    if "widths" in overrides:
        overrides["widths"] = _integers("widths", str(values["widths"]))
    return AutoencoderConfig.of(str(values["preset"]), **overrides)


def training_of(values: Values, autoencoder: AutoencoderConfig, start: str = "") -> Training:
    """The training that the flags name.

    Args:
      values: the values of the flags.
      autoencoder: the settings of the autoencoder.
      start: the digest of the parameters that it begins with; "" for new ones.

    Raises:
      ConfigError: a value is wrong.
    """
    size = _integers("size", str(values["size"]).replace("x", ","))
    require(len(size) == 2, "--size", values["size"], "must be height and width, such as 64,64")
    rates = {name: _number(name, str(values[name])) for name in ("divergence", "learning_rate", "clip")}
    names = ("batch", "steps", "seed", "error", "flip", "warmup", "schedule", "held_out", "every")
    others = {name: values[name] for name in names}
    return Training(autoencoder=autoencoder, start=start, size=size, **rates, **others)  # pyright: ignore


def _integers(name: str, text: str) -> tuple[int, ...]:
    return tuple(_parsed(int, name, part, "integers such as 32,64") for part in text.split(","))


def _number(name: str, text: str) -> float:
    return _parsed(float, name, text, "a number such as 1e-4")


def _parsed(kind: Callable[[str], T], name: str, text: str, legal: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"--{name}={text}: must be {legal}") from None


if __name__ == "__main__":
    run_plain(main)
