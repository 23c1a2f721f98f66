"""Double-stream diffusion transformers as a module."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from jaxtyping import Array, Float

from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context
from mmjax.models.denoiser import Denoiser
from mmjax.models.layers import Params
from mmjax.models.mmdit import layers
from mmjax.models.mmdit.config import MMDiTConfig
from mmjax.models.module import LayerGroup
from mmjax.models.parameters import Part


@dataclass(frozen=True)
class DoubleStreamTransformer(Denoiser):
    """A generator of pictures from noise, whose condition has places of its own in front of a picture's patches.

    The tokens of other modules are added to the features of these places, which are zeros.
    """

    config: MMDiTConfig

    Config = MMDiTConfig

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """One group of all layers."""
        c = self.config
        return (LayerGroup(c.layers, partial(layers.MMDiTLayer, c), partial(layers.block, c)),)

    def parts(self, *, first: bool, last: bool) -> tuple[Part, ...]:
        """The embeddings of patches and of the time of the first stage, and the head of the last."""
        return layers.parts(self.config, first=first, last=last)

    def inputs(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """ "segments" and "positions"; "patches" and "times" on the first stage, "targets" and "weights" on the
        last.
        """
        ends = (("patches", "times") if first else ()) + (("targets", "weights") if last else ())
        return ("segments", "positions", *ends)

    def embed(self, p: Params, context: Context) -> Float[Array, "R L+1 D"]:
        """Zeros for the condition, features of the context's host input "patches", which are noisy, and the time's.

        ``p`` are the module's parameters on its first stage.
        """
        return layers.embed(p, self.config, context)

    def end(self, p: Params, context: Context, x: Float[Array, "R L+1 D"]) -> Float[Array, "R L D"]:
        """The last norm, by the time, whose place ends here. ``p`` are the module's parameters on its last stage."""
        return layers.end(p, x)

    def positions_of(self, weight: str, length: int) -> int:
        """See ``Module``: those of a weight's stream, or the time's."""
        if "modulation/" in weight:
            return 1
        return self.config.queries if weight.startswith(layers.STREAMS[0]) else length

    @property
    def medium(self) -> EncoderSpec:
        """The cutting of a picture into patches, for the data side."""
        return replace(super().medium, references=self.config.references)

    def predict(self, p: Params, context: Context, x: Float[Array, "R L D"]) -> Float[Array, "R t E"]:
        """The prediction for each patch in fp32.

        ``p`` are the module's parameters on its last stage, and ``x`` is the result of ``end``.
        """
        return layers.predict(p, self.config, context, x)
