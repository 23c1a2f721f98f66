"""Which tokens go where in a model with any edges: chains of encoders, and images that generators see.

Legend: N tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from mmjax.models.config import LLM

if TYPE_CHECKING:
    from mmjax.data.types import Sample
    from mmjax.models.graph import MultimodalModel
    from mmjax.models.nodes import Edge


def media_encoders(model: MultimodalModel) -> list[str]:
    """Names of the encoders of media, such as ["vision", "audio"], in the model's order.

    Left out are those that read the tokens of an encoder, and encoders of latents.

    ``model`` is as ``build_model(recipe, tokenizer)`` gives it.
    """
    latents = [edge.source for edge in model.edges if edge.latents]
    return [name for name in model.encoders if name not in latents and not model.into(name)]


def first_encoder(model: MultimodalModel, name: str) -> str:
    """The encoder of the media whose tokens reach the encoder ``name``: itself, or the first of its chain.

    ``model`` is as ``build_model(recipe, tokenizer)`` gives it; names are such as "vision".
    """
    edges = model.into(name)
    return first_encoder(model, edges[0].source) if edges else name


def edges_into_llm(model: MultimodalModel) -> list[Edge]:
    """The edges from encoders into the LLM, in the order of the encoders; an edge's ``source`` is the encoder's name.

    ``model`` is as ``build_model(recipe, tokenizer)`` gives it.
    """
    order = list(model.encoders)
    return sorted(model.into(LLM), key=lambda edge: order.index(edge.source))


def image_before(model: MultimodalModel, sample: Sample, encoder: str, first: int) -> int | None:
    """The number, from 0, among the sample's images of an encoder, of the last one whose tokens all lie before token
    ``first``.

    ``None`` if there is none. ``model`` is as ``build_model(recipe, tokenizer)`` gives it, ``encoder`` a name such as
    "vision", and ``first`` an index from 0.
    """
    spec, end, number = model.nodes[encoder].module.medium, 0, None
    assert spec
    places_N = np.flatnonzero(sample.placeholders(encoder))
    for image, medium in enumerate(sample.media.get(encoder, ())):
        end += spec.tokens(*medium.shape[:2])
        if places_N[end - 1] < first:
            number = image
    return number


def nearest_tokens(drawing: Sequence[int], image: Sequence[int]) -> Int[np.ndarray, " N"]:
    """For each token of a drawing, row by row, the number of the token of an image whose centre is nearest to its own.

    Both fill the same square. Of two centres at equal distance the lower or right one counts. ``drawing`` and ``image``
    are numbers (rows, columns) of tokens, such as (4, 4) and (2, 2). Tokens of the image are numbered row by row, from
    0.
    """

    def nearest(number: int, count: int, image_count: int) -> int:
        # Centres (number + 1/2) / count, times 2 · count · image_count.
        distances = [abs((2 * number + 1) * image_count - (2 * other + 1) * count) for other in range(image_count)]
        return max(other for other in range(image_count) if distances[other] == min(distances))

    rows, columns = ([nearest(n, count, image[axis]) for n in range(count)] for axis, count in enumerate(drawing))
    return np.array([row * image[1] + column for row in rows for column in columns])
