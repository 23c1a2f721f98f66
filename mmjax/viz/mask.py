"""A picture of the mask over a training row, from counts of pairs: no array of all pairs is made.

Shapes: T tokens of a row, N blocks of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mmjax.assembly.assembly import plan
from mmjax.assembly.buckets import with_buckets
from mmjax.assembly.model import build_modules
from mmjax.assembly.samples import open_source
from mmjax.attention.language import PRESETS, WORDS
from mmjax.attention.mask import Mask
from mmjax.attention.pairs import pairs_of
from mmjax.configurable import gin_name
from mmjax.data.mask_words import token_kinds
from mmjax.data.packing import Packer
from mmjax.data.plan import MicrobatchPlan
from mmjax.data.process_rows import ProcessRows
from mmjax.data.types import Sample
from mmjax.models.config import LLM
from mmjax.recipe import Recipe
from mmjax.schedule.timeline import set_title, shown
from mmjax.viz.figures import finished

MOST_BLOCKS = 256
"""Blocks along a side of the picture; longer rows have several tokens in each."""
_TEXT, _LEARNED, _PADDING = "#9aa5b1", "#323f4b", "#ffffff"
_MEDIA = ("#3d6fb4", "#c77d0a", "#3a8f5c", "#9b4f96", "#b4443d", "#2f8f9d")


@dataclass(frozen=True)
class MaskedRow:
    """A packed row of the LLM.

    Attributes:
      inputs: its host inputs that masks read, by name, such as "segments" [T].
      kinds: [T], the kind of each token: "padding", "prompt", "learned text", or the module of its medium.
      masks: its masks, each with the number of layers that have it.
      line: the rules of the masks, in words.
      field: the name of the setting that has these rules.
    """

    inputs: Mapping[str, np.ndarray]
    kinds: np.ndarray
    masks: Mapping[Mask, int]
    line: str
    field: str


def first_row(recipe: Recipe) -> MaskedRow:
    """The row of the first training sample, as it is packed in the first microbatch; no medium is opened.

    The result, for `draw_mask`, has the kind of each token as `kinds` [T] and the LLM's masks. recipe: the
    configuration, as `load_config(["run.gin"])` gives it.

    Raises:
      ConfigError: two settings contradict each other, or the data cannot be read.
    """
    source = open_source(recipe, split="train")
    recipe = with_buckets(recipe, source)
    packer, module = plan(recipe, source).packer, build_modules(recipe)[LLM]
    metas = [source.meta(index) for index in range(recipe.train.global_batch)]
    part = packer.plan(0, metas).microbatches[0]
    samples = {index: source.sample(index, media=()) for index in range(len(part.metas))}
    read = ("segments", "positions", "order", *WORDS)
    names: dict[str, tuple[int, ...]] = dict.fromkeys(read, tuple(range(part.cells)))
    rows = packer.fill(part, samples, ProcessRows(cells={LLM: names})).inputs[LLM]
    row, masks = part.llm.places[0][0], dict[Mask, int]()
    for layers, mask in module.masks:
        masks[mask] = masks.get(mask, 0) + layers
    inputs = {name: np.asarray(rows[name])[row] for name in names if name in rows}
    if "order" in inputs:  # columns are in the order of context-parallel ranks
        columns = np.argsort(inputs.pop("order"))
        inputs = {name: values[columns] for name, values in inputs.items()}
    return MaskedRow(
        inputs=inputs,
        kinds=_kinds(packer, part, samples, row),
        masks=masks,
        line=module.sees,
        field=f"{LLM}/{gin_name(type(module.config))}.mask",
    )


def _kinds(packer: Packer, part: MicrobatchPlan, samples: Mapping[int, Sample], row: int) -> np.ndarray:
    """The kind of each token of a row, see ``MaskedRow``."""
    kinds = np.full(part.llm.width, "padding", object)
    for index, sample in samples.items():
        sample_row, start = part.llm.places[index]
        if sample_row != row:
            continue
        names = np.where(sample.loss_weights > 0, "learned text", "prompt").astype(object)
        for name, tokens in token_kinds(sample, packer.encoders).items():
            if name in packer.encoders:
                names[tokens] = name
        kinds[start : start + len(names)] = names
    return kinds


def seen_shares(mask: Mask, inputs: Mapping[str, np.ndarray], block: int) -> Float[np.ndarray, "N N"]:
    """The share of pairs, in [0, 1], that a mask allows between each block of queries (axis 0) and of keys (axis 1).

    Args:
      mask: the attention mask of T tokens, such as one of the keys of `first_row(recipe).masks`.
      inputs: a row's host inputs by name, "segments" and those of ``mask.input_names``: [T], or [T, A] for "positions".
      block: tokens of a block, of which there are N = ⌈T / block⌉; the last one may be shorter.
    """
    pairs, starts = pairs_of(mask, inputs), np.arange(0, len(inputs["segments"]), block)
    number_T = np.arange(pairs.tokens) // block
    sizes = np.bincount(number_T)
    columns = [np.add.reduceat(pairs.key_counts(number_T == key), starts) for key in range(len(starts))]
    return np.stack(columns, axis=1) / np.outer(sizes, sizes)


def draw_mask(row: MaskedRow, path: str | Path | None = None) -> Figure:
    """Draws a panel for each mask: queries downwards, keys to the right, in the colour of the key's kind.

    Writes the picture to `path` where one is given; its suffix chooses the format.

    row: a packed row of the LLM, as `first_row(recipe)` gives it.
    """
    length = len(row.kinds)
    block = -(-length // MOST_BLOCKS)
    names = [str(name) for name in dict.fromkeys(row.kinds.tolist())]
    colors = {"padding": _PADDING, "prompt": _TEXT, "learned text": _LEARNED}
    media = [name for name in names if name not in colors]
    colors |= {name: _MEDIA[number % len(_MEDIA)] for number, name in enumerate(media)}
    kinds_N = row.kinds[::block]
    figure = Figure(figsize=(1 + 5 * len(row.masks), 6), dpi=110, facecolor="white", layout="constrained")
    for axes, (mask, layers) in zip(np.atleast_1d(figure.subplots(1, len(row.masks))), row.masks.items(), strict=True):
        shares = seen_shares(mask, row.inputs, block)
        ink = np.array([to_rgb(colors[kind]) for kind in kinds_N])
        _draw_panel(axes, 1 - shares[..., None] * (1 - ink[None]), ink, row.inputs["segments"], block)
        share = sum(pairs_of(mask, row.inputs).key_counts()) / max(1, int((row.inputs["segments"] > 0).sum())) ** 2
        axes.set_title(f"{layers} layer{'s' * (layers > 1)}{_near(mask)}: {share:.1%} of pairs", fontsize=9)
    legend = [Patch(facecolor=colors[name], label=shown(name, 18)) for name in names if name != "padding"]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8, frameon=False)
    rules = PRESETS.get(row.line, row.line)
    set_title(figure, f"{row.field} = {row.line!r}" + (f": {rules}" if rules != row.line else ""), size=9)
    return finished(figure, path)


def _near(mask: Mask) -> str:
    parts = [f"window {mask.window}"] * bool(mask.window) + [f"chunk {mask.grid_window}"] * bool(mask.grid_window)
    return f", {', '.join(parts)}" if parts else ""


def _draw_panel(axes: Axes, image: np.ndarray, ink: np.ndarray, segments: Int[np.ndarray, " T"], block: int) -> None:
    """The pairs, a strip of the queries' kinds beside them, and lines where samples end."""
    count = len(image)
    strip = max(2, count // 40)
    gap = np.ones((count, max(1, strip // 2), 3))
    axes.imshow(
        np.concatenate([np.repeat(ink[:, None], strip, axis=1), gap, image], axis=1),
        interpolation="nearest",
        extent=(-(strip + gap.shape[1]) * block, count * block, count * block, 0),
    )
    for end in (np.flatnonzero(np.diff(segments)) + 1).tolist():
        axes.axhline(end, color="#b0b8c0", linewidth=0.6)
        axes.plot([end, end], [0, count * block], color="#b0b8c0", linewidth=0.6)
    axes.set_xlabel("key", fontsize=8)
    axes.set_ylabel("query", fontsize=8)
    axes.tick_params(labelsize=7)
