"""Makes the latents of pictures ahead, for generators of latents.

    python -m mmjax.latents --vae=sd-2.1/vae --pictures=photos --out=latents --size=512,512

The latents of an autoencoder and a way of resizing are in a folder of their own in ``--out``. Run again, the command
makes what is missing alone. ``mmjax.data.latents`` reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmjax.configurable import ConfigError, one_of, positive, require
from mmjax.data.sources.config import KINDS
from mmjax.flags import Flag, importing, one_line_errors, parse_flags, run_plain

USAGE = "python -m mmjax.latents"
FLAGS = (
    Flag(name="vae", doc="folder of an autoencoder, as diffusers writes it.", required=True),
    Flag(name="out", doc="folder of the latents; each autoencoder and size has a folder in it.", required=True),
    Flag(name="pictures", doc="folder of pictures, with the folders in it."),
    Flag(name="data", doc="file or files of records with pictures, in place of --pictures, as Source.path."),
    Flag(name="kind", doc="kind of --data, as Source.kind.", default="llava"),
    Flag(name="media", doc="folder of the media of --data, as Source.media."),
    Flag(name="size", doc="height and width that pictures are scaled to cover, such as 256,256; '' keeps shapes."),
    Flag(name="pixels", doc="the most pixels of a picture that keeps its shape.", default=65536),
    Flag(name="block", doc="pixels of which sides are multiples; 0 = those of one of a latent's pixels.", default=0),
    Flag(name="resample", doc="filter by which pictures are resized.", default="bicubic"),
    Flag(name="dtype", doc="of the latents on disk, float16 or float32.", default="float16"),
    Flag(name="batch", doc="pictures that a device encodes at a time.", default=4),
    Flag(name="shard", doc="latents after which a file is written; an interrupted run loses fewer.", default=512),
    Flag(name="tile", doc="pixels of a tile's side for pictures that do not fit a device; 0 = whole.", default=0),
    Flag(name="check", doc="compares latents with the pictures in place of making any.", default=False),
)
Values = Mapping[str, str | int | bool]


def main(argv: Sequence[str] | None = None) -> int:
    """Makes or checks latents; returns the exit status, 1 if ``--check`` finds faults.

    Args:
      argv: the arguments, without the program's name; by default this process's.

    Raises:
      SystemExit: with status 2, after a line on stderr about what is wrong.
    """
    with one_line_errors("interrupted; run it again to go on"):
        values = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, USAGE).values
        _check_flags(values)
        with importing():
            from mmjax.latents import running
        return running.run(values)


def _check_flags(values: Values) -> None:
    named = [name for name in ("pictures", "data") if values[name]]
    if len(named) != 1:
        raise ConfigError("name either --pictures=DIR or --data=FILE")
    one_of("--kind", str(values["kind"]), KINDS)
    one_of("--dtype", str(values["dtype"]), ("float16", "float32"))
    for name in ("batch", "shard"):
        positive(f"--{name}", int(values[name]))
    tile = int(values["tile"])
    require(tile >= 0 and tile % 2 == 0, "--tile", tile, "must be an even number of pixels, such as 512, or 0")
    require(Path(str(values["vae"])).is_dir(), "--vae", values["vae"], "is no folder; name one as diffusers writes it")


if __name__ == "__main__":
    run_plain(main)
