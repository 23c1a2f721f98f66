"""A run so small that it takes seconds, whose generator makes pictures of the names of colours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from mmjax.config import load_config
from mmjax.train.trainer import Trainer

CAPTIONED = """
Model.encoders = {}
Data.sources = {'mine': 1.0}
mine/Source.kind = 'pictures'
mine/Source.template = 'chatml'
mine/Source.draw = True
mine/Source.held_out = 2
Data.sequence_length = 96
Data.workers = 0
llm/Decoder.layers = 2
llm/Decoder.width = 16
llm/Decoder.heads = 2
llm/Decoder.kv_heads = 2
llm/Decoder.mlp = 24
llm/Layout.pp = 2
Train.steps = 2
Train.global_batch = 4
Train.microbatches = 2
Checkpoint.every = 2
Optimizer.learning_rate = 0.02
"""
"""A run on a folder of media with captions, of which a generator is still to be named."""
RUN = f"""{CAPTIONED}
mine/Source.drawn_size = (8, 8)
painter/Layout.rank_offset = 2
Train.eval_samples = 0
"""
DIT = """
Model.generators = {'painter': 'dit'}
painter/DiT.layers = 2
painter/DiT.width = 16
painter/DiT.heads = 2
painter/DiT.mlp = 24
painter/DiT.channels = 3
painter/DiT.steps = 4
painter/DiT.drop_condition = 0.3
painter/Layout.pp = 2
"""
UNET = """
Model.generators = {'painter': 'unet'}
painter/UNet.width = 16
painter/UNet.queries = 2
painter/UNet.channels = 3
painter/UNet.widths = (16, 24)
painter/UNet.heads_by_level = (2, 0)
painter/UNet.groups = 4
painter/UNet.process = 'ddpm'
painter/UNet.prediction = 'v'
painter/UNet.sampler = 'ddim'
painter/UNet.steps = 4
"""
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def write_painted(folder: Path, generator: str = DIT) -> Path:
    """Writes pictures of colours into `folder`, and the configuration of a run on them; returns its path."""
    (folder / "pictures").mkdir()
    for number in range(8):
        name = list(COLOURS)[number % 3]
        Image.new("RGB", (9, 9), COLOURS[name]).save(folder / "pictures" / f"{number}.png")
        (folder / "pictures" / f"{number}.txt").write_text(name)
    paths = f"mine/Source.path = {str(folder / 'pictures')!r}\nData.cache = {str(folder / 'cache')!r}\n"
    (folder / "run.gin").write_text(RUN + generator + paths)
    return folder / "run.gin"


def painted_run(folder: Path, changes: Sequence[str] = ()) -> Path:
    """The directory of a run that is trained on pictures of colours in `folder`."""
    with Trainer(load_config([write_painted(folder)], changes), folder / "run", style="silent") as trainer:
        trainer.train()
    return folder / "run"
