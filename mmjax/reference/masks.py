"""Which tokens of one sample read which, as an array of all pairs, from the line that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from mmjax.attention.language import PRESETS
from mmjax.reference.tiles import in_rows

if TYPE_CHECKING:
    from mmjax.data.types import Sample
    from mmjax.models.graph import MultimodalModel


def reads_of(model: MultimodalModel, sample: Sample, room: int = 0) -> tuple[jax.Array, jax.Array] | None:
    """Whether each token reads each, in layers with the window or chunks and in those without; padded with text that is
    answered, up to `room` tokens. `None` where every token reads those before it, in a window or not."""
    decoder, line = model.llm, PRESETS.get(model.llm.mask, model.llm.mask)
    if line == PRESETS["causal"] and not decoder.chunk:
        return None
    kinds, items = _tokens(model, sample, max(room, len(sample.tokens)))
    at = np.arange(len(kinds))
    apart = at[:, None] - at[None, :]
    together = np.equal.outer(at // decoder.chunk, at // decoder.chunk) if decoder.chunk else True
    near, far = np.equal.outer(at, at), np.equal.outer(at, at)  # every token reads itself
    for rule in filter(None, map(str.strip, line.split(";"))):
        who, whom, how = _parsed(rule)
        pair = np.outer([not who.isdisjoint(own) for own in kinds], [not whom.isdisjoint(own) for own in kinds])
        if how == "before":
            far |= pair & (apart >= 0)
            near |= pair & (apart >= 0) & (apart < (decoder.window or len(at))) & together
        elif how == "everywhere":
            far |= pair
            near |= pair & together
        else:
            own = pair & np.equal.outer(items, items) & (items > 0)
            far, near = far | own, near | own
    return jnp.asarray(near), jnp.asarray(far)


def _parsed(rule: str) -> tuple[set[str], set[str], str]:
    """Kinds that read, kinds that are read, and the word for how."""
    words = rule.replace(",", " ").split()
    verb = next(i for i, word in enumerate(words) if word in ("see", "sees"))
    how = next(i for i, word in enumerate(words) if word in ("before", "everywhere", "in"))
    return set(words[:verb]) - {"and"}, set(words[verb + 1 : how]) - {"and"}, words[how]


def _tokens(model: MultimodalModel, sample: Sample, length: int) -> tuple[list[set[str]], Bool[np.ndarray, " N"]]:
    """The kinds of each token, and the number of its image, recording or drawing; 0 for text."""
    items, number, known = np.zeros(length, int), 0, len(sample.tokens)
    kinds = [{"all", "text"} for _ in range(length)]
    for name in (*model.encoders, *model.generators):
        places = list(np.flatnonzero(sample.placeholders(name)))
        for place in places:
            kinds[place] = {"all", "media", name}
        for count in _counts(model, sample, name):
            number += 1
            items[places[:count]] = number
            places = places[count:]
    first = min([sample.prompt, *(at for at in range(1, known) if sample.loss_weights[at] > 0)])
    for at, own in enumerate(kinds):
        own.add("prefix" if at < min(first, known) else "suffix")
    return kinds, items


def _counts(model: MultimodalModel, sample: Sample, name: str) -> list[int]:
    """Tokens of each image, recording or drawing of a module."""
    node, media = model.nodes[name], sample.media.get(name, ())
    spec = node.module.medium
    assert spec
    sides = [[side // spec.patch // spec.merge for side in medium.shape[:-1]] for medium in media]
    if not (node.projector and node.projector.newline):
        return [int(np.prod(own)) for own in sides]
    found, first = [], 0
    for tiled in sample.tiled.get(name, ()):
        count = 1 + tiled.grid[0] * tiled.grid[1]
        rows, columns = sides[first]
        blank = [jnp.zeros((rows * columns, 1)) for _ in range(count)]
        ordered = in_rows(blank, (rows, columns), tiled.grid, tiled.size, jnp.zeros(1), node.projector.most_tiles)
        found.append(ordered.shape[0])
        first += count
    return found
