"""Settings of low-rank adapters. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mmjax.configurable import configurable, not_negative, positive, require

ATTENTION = "attention"
"""A target: all products by which tokens of a layer read each other, whatever the layer's kind."""
_KINDS = ("*attn/*", "delta/*")
"""Names of these products' weights: of attention, with latents or without, of several streams ("condition_attn") and of
a UNet's blocks, and of delta layers.
"""


@configurable("Lora")
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters of a module (Hu et al., "LoRA", 2021): y = x W + (alpha / rank) (x A) B.

    A and B are parameters of the module "<module>_lora". The module itself is trained too, unless its Optimizer.frozen
    is set.

    Attributes:
      path: a folder of PEFT (adapter_config.json, adapter_model.safetensors) with rank, alpha, targets and the initial
        adapters; '' for new adapters.
      rank: columns of A and rows of B; 0 adds no adapters.
      alpha: the adapters' products are multiplied by alpha / rank.
      targets: the weights of each layer that have an adapter: names inside a layer or patterns, such as 'mlp/*'; also
        Hugging Face's names, such as 'q_proj', and 'all-linear'. 'attention' is all products of attention: 'attn/q',
        'attn/k', 'attn/v' and 'attn/o', those to and from the latents of latent attention, and those of delta layers.
    """

    path: str = field(default="", metadata={"example": "adapters/mine"})
    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = field(default=(ATTENTION,), metadata={"example": ("attn/*", "mlp/*")})

    def __post_init__(self) -> None:
        not_negative("Lora.rank", self.rank)
        positive("Lora.alpha", self.alpha, 16.0)
        require(bool(self.targets), "Lora.targets", self.targets, "names no weight; give one or more, or set rank to 0")

    def adapts(self, name: str) -> bool:
        """Whether a weight of a layer, such as "attn/q", has an adapter by ``targets``; ``rank`` is not read."""
        return any(is_target(name, target) for target in self.targets)

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason: "alpha" and "targets" for rank 0,
        else {}.
        """
        return {} if self.rank else dict.fromkeys(("alpha", "targets"), "Lora.rank=0 adds no adapters")

    @property
    def scale(self) -> float:
        """The factor of the adapters' products, alpha / rank; 0 without adapters."""
        return self.alpha / self.rank if self.rank else 0.0


def is_target(weight: str, target: str) -> bool:
    """Whether a target, a native name, a pattern or ``ATTENTION``, stands for a weight of a layer, such as "attn/q"."""
    return any(fnmatchcase(weight, pattern) for pattern in (_KINDS if target == ATTENTION else (target,)))


NO_LORA = LoraConfig()
"""No adapters."""
