"""The dense reference: what every layout, schedule and placement is compared with.

One device, one sample and one medium at a time, plain Python loops over layers: no packing, padding, bucket, `scan`,
`shard_map` or stacked parameter. Parameters are the flat dict of logical leaves (`llm/layers/000/attn/q`, ...).
Nothing here calls the code it judges: forward, loss, clipping and AdamW are written again from their equations, and a
`MultimodalModel` serves as the description of a module graph only. Widths that configs leave open (head dims, the
projector's hidden width) are read off the leaves.

Arithmetic is fp32 with the highest matmul precision. Leaves that are float64 under JAX's x64 mode stay float64,
which is how the reference's own gradients are checked against finite differences.

Letters in shapes: N tokens of a sample, T patches of an image or a recording, D width, H heads, G key/value heads,
K head dim, F mlp width or frames of a recording, V vocabulary, P patch side, C channels, M mel bins, X numbers in a
patch.
"""

from mmjax.reference.encoders import encode_image, encode_recording, sinusoids
from mmjax.reference.positions import cut_patches, patch_positions
from mmjax.reference.training import (
    Training,
    TrainState,
    adamw_step,
    global_norm,
    learning_rate,
    rate_factors,
    train_steps,
)
from mmjax.reference.whole import (
    LossAndGradients,
    denominators,
    draw,
    greedy,
    loss_sum,
    loss_sums,
    sample_logits,
    step_loss_and_gradients,
)

__all__ = [
    "LossAndGradients",
    "TrainState",
    "Training",
    "adamw_step",
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
