"""Counts of Stable Diffusion 2.1: parameters, FLOPs and kept bytes of its U-Net and of the encoder before it.

A U-Net has most of its parameters where the picture is smallest, so FLOPs do not follow from parameters as they do for
a stack of equal layers. The shapes are those of Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion
Models" (2022), in the sizes of version 2.1: 865,910,724 parameters in the U-Net, 34,163,592 in the encoder of pictures.
Trained models have the network itself (`mmjax.models.unet`), whose FLOPs, traced, are those of this formula.
"""

from __future__ import annotations

from dataclasses import dataclass

WIDTH, LATENTS = 320, 4
STEPS = (1, 2, 4, 4)
"""Width of each level of the U-Net, in units of `WIDTH`; each level has half the side of the one before it."""
ATTENTION = 3
"""Number of levels with attention, counted from the first."""
CONTEXT, CONTEXT_WIDTH = 77, 1024
"""Number of tokens that a picture is drawn from, and their width."""
PICTURE_WIDTH, PICTURE_STEPS = 128, (1, 2, 4, 4)
SCALE = 8
"""Pixels along the side of a latent."""
BYTES = 2


@dataclass(kw_only=True)
class Count:
    """Sums over the layers so far: parameters, FLOPs of a forward, bytes that a backward reads."""

    parameters: int = 0
    flops: int = 0
    kept_bytes: int = 0

    def product(self, inputs: int, outputs: int, places: int, *, taps: int = 1, bias: bool = True) -> None:
        """A linear layer, or a convolution of so many taps, whose input is `places` wide."""
        self.parameters += inputs * outputs * taps + bias * outputs
        self.flops += 2 * inputs * outputs * taps * places
        self.kept_bytes += BYTES * inputs * places

    def norm(self, width: int, places: int, *, silu: bool = False) -> None:
        """A norm with scale and shift, and the activation after it."""
        self.parameters += 2 * width
        self.kept_bytes += BYTES * width * places * (1 + silu)

    def residual(self, inputs: int, outputs: int, places: int, time: int) -> None:
        """A block of two convolutions; `time` is the width of the time embedding, 0 for none."""
        self.norm(inputs, places, silu=True)
        self.product(inputs, outputs, places, taps=9)
        if time:
            self.product(time, outputs, 1)
        self.norm(outputs, places, silu=True)
        self.product(outputs, outputs, places, taps=9)
        if inputs != outputs:
            self.product(inputs, outputs, places)

    def transformer(self, width: int, places: int) -> None:
        """Attention of a picture to itself and to its context, and a gated mlp, between two linear layers."""
        self.norm(width, places)
        self.product(width, width, places)
        for tokens, context_width in ((places, width), (CONTEXT, CONTEXT_WIDTH)):
            self.norm(width, places)
            self.product(width, width, places, bias=False)
            self.product(context_width, width, tokens, bias=False)
            self.product(context_width, width, tokens, bias=False)
            self.attention(width, places, tokens)
            self.product(width, width, places)
        self.norm(width, places)
        self.product(width, 8 * width, places)
        self.kept_bytes += BYTES * 8 * width * places
        self.product(4 * width, width, places)
        self.product(width, width, places)

    def attention(self, width: int, places: int, tokens: int) -> None:
        """Scores and their sums; queries, keys and values are kept."""
        self.flops += 4 * places * tokens * width
        self.kept_bytes += BYTES * width * (places + 2 * tokens)


def unet(side: int) -> Count:
    """The U-Net on a picture of `side` by `side` pixels."""
    count, time = Count(), 4 * WIDTH
    widths = [WIDTH * step for step in STEPS]
    places = [(side // SCALE // 2**level) ** 2 for level in range(len(widths))]
    count.product(WIDTH, time, 1)
    count.product(time, time, 1)
    count.product(LATENTS, WIDTH, places[0], taps=9)
    width, skipped = WIDTH, [WIDTH]
    for level, outputs in enumerate(widths):
        for _ in range(2):
            _block(count, level, width, outputs, places[level])
            width = outputs
            skipped.append(width)
        if level + 1 < len(widths):
            count.product(width, width, places[level + 1], taps=9)
            skipped.append(width)
    count.residual(width, width, places[-1], time)
    count.transformer(width, places[-1])
    count.residual(width, width, places[-1], time)
    for level, outputs in reversed(list(enumerate(widths))):
        for _ in range(3):
            _block(count, level, width + skipped.pop(), outputs, places[level])
            width = outputs
        if level:
            count.product(width, width, places[level - 1], taps=9)
    count.norm(width, places[0], silu=True)
    count.product(width, LATENTS, places[0], taps=9)
    return count


def _block(count: Count, level: int, inputs: int, outputs: int, places: int) -> None:
    count.residual(inputs, outputs, places, 4 * WIDTH)
    if level < ATTENTION:
        count.transformer(outputs, places)


def picture_encoder(side: int) -> Count:
    """The encoder that makes latents of a picture of `side` by `side` pixels; never trained."""
    count, width = Count(), PICTURE_WIDTH
    widths = [PICTURE_WIDTH * step for step in PICTURE_STEPS]
    places = [(side // 2**level) ** 2 for level in range(len(widths))]
    count.product(3, width, places[0], taps=9)
    for level, outputs in enumerate(widths):
        for _ in range(2):
            count.residual(width, outputs, places[level], 0)
            width = outputs
        if level + 1 < len(widths):
            count.product(width, width, places[level + 1], taps=9)
    count.residual(width, width, places[-1], 0)
    count.norm(width, places[-1])
    for _ in range(4):
        count.product(width, width, places[-1])
    count.attention(width, places[-1], places[-1])
    count.residual(width, width, places[-1], 0)
    count.norm(width, places[-1], silu=True)
    count.product(width, 2 * LATENTS, places[-1], taps=9)
    return count
