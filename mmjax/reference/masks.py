"""The attention mask of one sample as an array of all pairs of tokens, from the rules of the mask's language."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from mmjax.attention.language import PRESETS
from mmjax.reference.edges import media_encoders
from mmjax.reference.tiles import in_rows

if TYPE_CHECKING:
    from mmjax.data.types import Sample
    from mmjax.models.graph import MultimodalModel


def masks_of(model: MultimodalModel, sample: Sample, room: int = 0) -> tuple[jax.Array, jax.Array] | None:
    """The masks of layers with a window or chunks and of layers without, in this order.

    Args:
      model: the model, as `build_model(recipe, tokenizer)` gives it; its LLM has the mask.
      sample: the sample, a `data.types.Sample`.
      room: number of tokens up to which the sample is padded, with text of the answer; 0 for no padding. N is the
        larger of `room` and the sample's length.

    Returns:
      Two arrays [N, N], true where a token (the row) reads another. `None` for a causal mask without chunks.
    """
    decoder, line = model.llm, PRESETS.get(model.llm.mask, model.llm.mask)
    if line == PRESETS["causal"] and not decoder.chunk:
        return None
    kinds, items = _tokens(model, sample, max(room, len(sample.tokens)))
    at = np.arange(len(kinds))
    distance = at[:, None] - at[None, :]
    same_chunk = np.equal.outer(at // decoder.chunk, at // decoder.chunk) if decoder.chunk else True
    near, far = np.equal.outer(at, at), np.equal.outer(at, at)  # every token reads itself
    for rule in filter(None, map(str.strip, line.split(";"))):
        readers, targets, extent = _parse(rule)
        pair = np.outer(
            [not readers.isdisjoint(token_kinds) for token_kinds in kinds],
            [not targets.isdisjoint(token_kinds) for token_kinds in kinds],
        )
        if extent == "before":
            far |= pair & (distance >= 0)
            near |= pair & (distance >= 0) & (distance < (decoder.window or len(at))) & same_chunk
        elif extent == "everywhere":
            far |= pair
            near |= pair & same_chunk
        else:
            in_item = pair & np.equal.outer(items, items) & (items > 0)
            far, near = far | in_item, near | in_item
    return jnp.asarray(near), jnp.asarray(distance >= 0 if decoder.full_causal else far)


def _parse(rule: str) -> tuple[set[str], set[str], str]:
    """Kinds of tokens that read, kinds that are read, and the extent: "before", "everywhere" or "in"."""
    words = rule.replace(",", " ").split()
    verb = next(i for i, word in enumerate(words) if word in ("see", "sees"))
    extent = next(i for i, word in enumerate(words) if word in ("before", "everywhere", "in"))
    return set(words[:verb]) - {"and"}, set(words[verb + 1 : extent]) - {"and"}, words[extent]


def _tokens(model: MultimodalModel, sample: Sample, length: int) -> tuple[list[set[str]], Bool[np.ndarray, " N"]]:
    """The kinds of each token, and the number of its image, recording or drawing; 0 for text."""
    items, number, sample_length = np.zeros(length, int), 0, len(sample.tokens)
    kinds = [{"all", "text"} for _ in range(length)]
    for name in (*media_encoders(model), *(name for name in model.generators if name in sample.media_tokens)):
        places = list(np.flatnonzero(sample.placeholders(name)))
        for place in places:
            kinds[place] = {"all", "media", name}
        for count in _counts(model, sample, name):
            number += 1
            items[places[:count]] = number
            places = places[count:]
    first = min([sample.prompt, *(at for at in range(1, sample_length) if sample.loss_weights[at] > 0)])
    for at, token_kinds in enumerate(kinds):
        token_kinds.add("prefix" if at < min(first, sample_length) else "suffix")
    return kinds, items


def _counts(model: MultimodalModel, sample: Sample, name: str) -> list[int]:
    """Tokens of each image, recording or drawing of a module."""
    node, media = model.nodes[name], sample.media.get(name, ())
    spec = node.module.medium
    assert spec
    sides = [[side // spec.patch // spec.merge for side in medium.shape[:-1]] for medium in media]
    if not (node.projector and node.projector.newline):
        return [int(np.prod(medium_sides)) for medium_sides in sides]
    counts, first = [], 0
    for tiled in sample.tiled.get(name, ()):
        count = 1 + tiled.grid[0] * tiled.grid[1]
        rows, columns = sides[first]
        blank = [jnp.zeros((rows * columns, 1)) for _ in range(count)]
        ordered = in_rows(blank, (rows, columns), tiled.grid, tiled.size, jnp.zeros(1), node.projector.most_tiles)
        counts.append(ordered.shape[0])
        first += count
    return counts
