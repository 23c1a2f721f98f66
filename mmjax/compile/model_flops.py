"""Model FLOPs of programs and steps, under two rules for causal attention.

By the first a causal mask's pairs count, as in `models.flops`; by the second all pairs of a segment, as many papers
count. Recompute counts in neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmjax.data.lengths import lengths_of
from mmjax.data.types import SampleMeta
from mmjax.models import flops
from mmjax.models.config import LLM
from mmjax.models.graph import MultimodalModel
from mmjax.models.traced_flops import traced_work
from mmjax.pipeline.place import InputShapes, Stage
from mmjax.recipe import Recipe


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs that a model needs.

    Attributes:
      causal: with the pairs that masks allow.
      full: with all pairs of a segment.
    """

    causal: float = 0.0
    full: float = 0.0

    def __add__(self, other: ModelFlops) -> ModelFlops:
        return ModelFlops(self.causal + other.causal, self.full + other.full)

    def times(self, factor: float) -> ModelFlops:
        """Both, multiplied by `factor`."""
        return ModelFlops(self.causal * factor, self.full * factor)


def step_flops(recipe: Recipe, model: MultimodalModel, metas: Sequence[SampleMeta]) -> ModelFlops:
    """Model FLOPs of a step on all devices; padding counts as nothing, masks of words as causal.

    Args:
      recipe: the configuration, which says what is frozen.
      model: its model.
      metas: the samples of the step.
    """
    lengths = lengths_of(metas, [name for name in recipe.model if name != LLM])
    causal, full = (
        flops.training_flops(model, lengths, recipe.model.frozen, pairs) for pairs in (None, _all(model, lengths))
    )
    return ModelFlops(sum(causal.values()), sum(full.values()))


def stage_flops(recipe: Recipe, model: MultimodalModel, stage: Stage, inputs: InputShapes) -> dict[str, ModelFlops]:
    """Model FLOPs of a stage's F, B and W for a microbatch on one of its devices, by the letter of the program.

    Each row counts as one segment. Where the backward is one program, "B" and "W" together are its FLOPs.

    Args:
      recipe: the configuration, which says what is frozen.
      model: its model.
      stage: the stage on its devices, or a lane of it.
      inputs: shapes of the microbatch.
    """
    module = stage.model.module
    node = model.nodes[module].module
    rows, width = inputs[module]["segments"].shape
    lengths = {module: [width - (node.medium.special if node.medium else 0)] * rows}
    causal, full = (flops.forward_flops(model, lengths, pairs) for pairs in (None, _all(model, lengths)))
    factors = flops.training_factors(model, recipe.model.frozen)
    result = dict.fromkeys("FBW", ModelFlops())
    for part in stage.model.slices:
        layers = sum(len(run.layers) for run in part.runs) / part.depth if part.depth else 1.0
        forward = ModelFlops(causal.get(part.module, 0) * layers, full.get(part.module, 0) * layers)
        if part.module == module:
            ends = float(traced_work(node).ends * sum(lengths[module]))
            has_ends = stage.model.ends if node.losses else stage.model.index == 0
            forward += ModelFlops(ends, ends).times(has_ends - layers)
        for letter, factor in zip("FBW", (1, factors[part.module] > 1, factors[part.module] > 2), strict=True):
            result[letter] += forward.times(factor)
    devices = len(stage.submesh.ranks) // stage.submesh.layout.copies
    return {letter: counted.times(1 / devices) for letter, counted in result.items()}


def _all(model: MultimodalModel, lengths: Mapping[str, Sequence[int]]) -> dict[str, flops.Pairs]:
    """All pairs of each segment, by module and mask."""
    result: dict[str, flops.Pairs] = {}
    for name, segments in lengths.items():
        module = model.nodes[name].module
        special = module.medium.special if module.medium else 0
        pairs = sum((int(length) + special) ** 2 for length in segments)
        if pairs:
            result[name] = dict.fromkeys((mask for _, mask in module.masks), pairs)
    return result
