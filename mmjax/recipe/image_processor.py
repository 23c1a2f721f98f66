"""Rules for images in the folder of a whole model: those that its run had, in the words of ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.processor.image_rules import FREE, image_settings
from mmjax.data.sources.config import RESAMPLES, SourceConfig
from mmjax.recipe.recipe import Recipe
from mmjax.user_code import names_code

IMAGES = "preprocessor_config.json"
_TYPES = {"stretch": "SiglipImageProcessor", "crop": "CLIPImageProcessor", "square": "LlavaImageProcessor"}
"""Image processors by `Source.fit`."""


def image_processor(recipe: Recipe, tower: str, channels: int) -> tuple[bytes, str]:
    """The content of ``preprocessor_config.json`` for a run's images.

    The tower's own file stays where the run reads images by it, or has no dataset with rules for images.

    Args:
      recipe: the run's.
      tower: the folder that the image encoder started from; "" for none.
      channels: channels of the encoder's images.

    Returns:
      The file and ""; or no bytes, and why no processor of ``transformers`` gives the run's pixels.
    """
    original = Path(tower) / IMAGES
    kept = original.read_bytes() if tower and original.is_file() else b""
    sources = recipe.data.sources
    if not sources:
        return kept, "" if kept else f"Data.task={recipe.data.settings.task!r} has no rules for images"
    if kept and all(_is_read_by(source, tower) for source in sources.values()):
        return kept, ""
    try:
        files = {name: _processor(name, source, channels) for name, source in sources.items()}
    except ConfigError as error:
        return b"", str(error)
    first, *others = files.values()
    if any(other != first for other in others):
        return b"", f"{', '.join(files)} have different rules for images"
    return (json.dumps(first, indent=2) + "\n").encode(), ""


def _is_read_by(source: SourceConfig, folder: str) -> bool:
    """Whether a dataset's images follow the rules of a folder."""
    try:
        rules = image_settings(folder)
    except ConfigError:
        return False
    return all(getattr(source, name) == value for name, value in rules.items() if name not in FREE)


def _processor(name: str, source: SourceConfig, channels: int) -> dict[str, Any]:
    """The image processor of ``transformers`` that gives the pixels of a dataset's images.

    Raises:
      ConfigError: there is none.
    """
    (height, width), fit = source.size, source.fit
    edge = source.edge or min(height, width)
    if channels != 3:
        raise ConfigError(f"ViT.channels={channels}: its processors give three channels")
    if names_code(source.kind):
        raise ConfigError(f"{name}/Source.kind={source.kind!r}: a reader of your own makes the pixels")
    if not source.rounded:
        raise ConfigError(f"{name}/Source.rounded=False: it rounds resized levels for such a tower")
    if source.resize != "fixed":
        raise ConfigError(f"{name}/Source.resize={source.resize!r}: it has 'fixed' alone for such a tower")
    if fit not in _TYPES or (fit != "stretch" and not source.edge and height != width):
        raise ConfigError(f"{name}/Source.fit={fit!r}: it has 'stretch', and for squares 'crop' and 'square'")
    means, deviations = (values * (3 // max(1, len(values))) for values in (source.mean, source.std))
    sides = {"height": height, "width": width}
    crops = {} if fit == "stretch" else {"do_center_crop": True, "crop_size": sides}
    return {
        "image_processor_type": _TYPES[fit],
        "do_convert_rgb": True,
        "do_resize": True,
        "size": sides if fit == "stretch" else {"shortest_edge": edge},
        "resample": RESAMPLES.index(source.resample),
        **crops,
        **({"do_pad": True} if fit == "square" else {}),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": bool(means),
        **({"image_mean": means, "image_std": deviations} if means else {}),
    }
