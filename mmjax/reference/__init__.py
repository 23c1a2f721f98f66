"""The dense reference, with which every layout, schedule and placement is compared.

It runs on one device, takes one sample and one medium at a time, and loops over layers in plain Python: no packing,
padding, bucket, `scan`, `shard_map` or stacked parameter. Parameters are the flat dict of logical leaves
(`llm/layers/000/attn/q`, ...). The reference does not call the code that it checks: forward, loss, clipping and AdamW
are written again from their equations, and a `MultimodalModel` is only the description of a module graph. Widths that
configs leave open (head dims, the projector's hidden width) are taken from the shapes of leaves.

Arithmetic is fp32 with the highest matmul precision. Leaves that are float64 under JAX's x64 mode stay float64,
which is how the reference's own gradients are checked against finite differences.

Letters in shapes: N tokens of a sample, T patches of an image or a recording, D width, H heads, G key/value heads,
K head dim, F mlp width or frames of a recording, V vocabulary, P patch side, C channels, M mel bins, X numbers in a
patch.
"""

from mmjax.reference.encoders import encode_image, encode_recording, sinusoids
from mmjax.reference.model import (
    LossAndGradients,
    denominators,
    draw,
    greedy,
    loss_sum,
    loss_sums,
    sample_logits,
    step_loss_and_gradients,
)
from mmjax.reference.positions import cut_patches, patch_positions
from mmjax.reference.training import (
    Training,
    TrainState,
    adamw_step,
    bias_updates,
    global_norm,
    learning_rate,
    rate_factors,
    train_steps,
)

__all__ = [
    "LossAndGradients",
    "TrainState",
    "Training",
    "adamw_step",
    "bias_updates",
    "cut_patches",
    "denominators",
    "draw",
    "encode_image",
    "encode_recording",
    "global_norm",
    "greedy",
    "learning_rate",
    "loss_sum",
    "loss_sums",
    "patch_positions",
    "rate_factors",
    "sample_logits",
    "sinusoids",
    "step_loss_and_gradients",
    "train_steps",
]
