"""Pictures and recordings that a run's generators make of messages."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmjax.assembly.latents import Decoders, usual_size
from mmjax.assembly.vocoders import Recording, Vocoders
from mmjax.configurable import ConfigError, require
from mmjax.data.messages import Dialogue, write_messages
from mmjax.data.picture_prompts import Extent, Size, messages_of, sizes_of, with_blanks
from mmjax.data.types import Sample
from mmjax.flags import importing
from mmjax.models.diffusion import Diffusion
from mmjax.recipe import Recipe

if TYPE_CHECKING:
    from mmjax.generate.messages import Prompts

Pictures = tuple[np.ndarray | Recording, ...]
"""Pictures [h, w, C] in the range that is learned, -1…1, or recordings."""


def with_drawing(recipe: Recipe, **changes: Any) -> Recipe:
    """The configuration with other settings of drawing, fields of `Diffusion` such as `steps=50`, in all generators.

    Raises:
      ConfigError: no generator of the model has such settings, or a value is illegal.
    """
    drawn = [name for name, node in recipe.model.nodes.items() if isinstance(node.settings, Diffusion)]
    if not drawn:
        raise ConfigError(f"Model.generators={dict(recipe.model.config.generators)}: none of them makes pictures")
    model = recipe.model.map(lambda node: node.with_settings(**changes) if node.name in drawn else node)
    return replace(recipe, model=model)


def draw_pictures(
    recipe: Recipe,
    run_dir: str | Path,
    dialogues: Sequence[Dialogue],
    *,
    media: str = ".",
    samples: int = 1,
    seed: int = 0,
    source: str = "",
    named: str = "--messages",
    style: str = "auto",
) -> list[list[Pictures]]:
    """Makes the pictures and recordings that the last messages of dialogues ask for; all processes of a run call it.

    Args:
      recipe: a run's, as `load_run_config(run_dir)` gives it, under any layout, or that of a folder of weights.
      run_dir: the run's directory; "" takes the parameters that the configuration names.
      dialogues: lists of messages, each of which `ends_with_picture`.
      media: the folder that names of media start from.
      samples: number of answers to each dialogue, from different noise.
      seed: of the noise. An answer's noise follows from the seed and the answer's number, whatever the dialogue is.
      source: the name in `Data.sources` whose template and preprocessing the messages get; "" where all have the same.
      named: name of the messages in errors.
      style: the style of the progress display: "auto", "bar", "lines" or "silent".

    Returns:
      By dialogue and by sample, the pictures [h, w, C] of the last message, in -1…1, and the recordings.

    Raises:
      ConfigError: there are no parameters, a message cannot be read, or the devices do not fit.
      CheckpointError: the checkpoint is of another model.
    """
    with importing():
        from mmjax.eval.evaluator import require_checkpoint
        from mmjax.generate.messages import for_pictures
        from mmjax.generate.writer import Writer

    if run_dir:
        require_checkpoint(run_dir)
    decoders = Decoders.of(recipe)
    decoders.require_known()
    vocoders = Vocoders.of(recipe)
    default = _usual_size(recipe)
    names = [f"{named}: prompt {number}" if len(dialogues) > 1 else named for number in range(1, len(dialogues) + 1)]
    sizes = [sizes_of(dialogue, default, name) for dialogue, name in zip(dialogues, names, strict=True)]
    for dialogue in dialogues:
        require(len(messages_of(dialogue)) > 1, named, "[…]", "a picture is made of a message before it; write one")
    records = [with_blanks(*of_one) for of_one in zip(dialogues, sizes, strict=True) for _ in range(samples)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "messages.jsonl"
        write_messages(records, path, media, named, is_prompt=False)
        try:
            prompts = for_pictures(recipe, str(path), media=media, cache=folder, source=source)
            of_messages = map(decoders.with_latents, prompts.samples())
            drawn = [_noisy(sample, seed, number % samples) for number, sample in enumerate(of_messages)]
            for number, sample in enumerate(drawn):
                _require_sizes(prompts, sample, sizes[number // samples], names[number // samples])
            prompts.require_positions(drawn)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(path), named)) from None
        pictures = Writer(prompts, run_dir, style, text=False).draw(drawn)
    made = [
        tuple(
            vocoders.recording(name, medium) if name in vocoders.log_mels else decoders.picture(name, medium)
            for name, media in by_generator.items()
            for medium in media
        )
        for by_generator in pictures
    ]
    return [made[first : first + samples] for first in range(0, len(made), samples)]


def write_pictures(folder: Path, pictures: Sequence[Sequence[Pictures]]) -> list[list[list[str]]]:
    """Writes pictures as PNG files, "<prompt>-<sample>.png", and recordings as WAV files, "<prompt>-<sample>.wav".

    Of several in an answer the names are "<prompt>-<sample>-<number>.png".

    Args:
      folder: the folder, which exists.
      pictures: as `draw_pictures` gives them.

    Returns:
      The paths, by dialogue and by sample.
    """
    from PIL import Image

    from mmjax.viz.grid import as_levels

    paths: list[list[list[str]]] = []
    for prompt, of_prompt in enumerate(pictures, 1):
        paths.append([])
        for sample, of_sample in enumerate(of_prompt, 1):
            numbers = [f"-{number}" if len(of_sample) > 1 else "" for number in range(1, len(of_sample) + 1)]
            files = list[Path]()
            for number, medium in zip(numbers, of_sample, strict=True):
                ending = "wav" if isinstance(medium, Recording) else "png"
                files.append(folder / f"{prompt}-{sample}{number}.{ending}")
                if isinstance(medium, Recording):
                    medium.write(files[-1])
                else:
                    Image.fromarray(as_levels(medium)).save(files[-1])
            paths[-1].append([str(file) for file in files])
    return paths


def _usual_size(recipe: Recipe) -> Size | None:
    """The size of all pictures that the run was trained on, if they have one."""
    latents = [node.latents.path for node in recipe.model.nodes.values() if node.latents.path]
    if latents:
        return usual_size(latents[0])
    sizes = {source.drawn_size for source in recipe.data.sources.values()}
    return sizes.pop() if len(sizes) == 1 and any(next(iter(sizes))) else None


def _noisy(sample: Sample, seed: int, number: int) -> Sample:
    """The sample with the noise of answer ``number``, from 0: it depends on no other sample."""
    rng = np.random.default_rng([seed, number])
    noise = {
        name: tuple(rng.standard_normal(of_one.shape, np.float32) for of_one in of_generator)
        for name, of_generator in sample.noise.items()
    }
    return replace(sample, noise=noise)


def _require_sizes(prompts: Prompts, sample: Sample, sizes: Sequence[Extent], name: str) -> None:
    """Raises ConfigError unless the generator makes pictures of exactly these sizes."""
    for generator in sample.noise:
        block = prompts.specs[generator].block * prompts.specs[generator].factor
        for height, width in (size for size in sizes if isinstance(size, tuple)):
            fix = f"{generator!r} makes multiples of {block} pixels"
            nearest = " and ".join(str(max(1, round(side / block)) * block) for side in (height, width))
            legal = height % block == 0 == width % block
            require(legal, f"{name}: height, width", (height, width), f"{fix}; write {nearest}")
            if pictures := prompts.specs[generator].pictures:
                pictures.canvas(pictures.grid(height, width))  # raises if none holds it
