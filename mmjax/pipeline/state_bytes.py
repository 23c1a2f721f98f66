"""Bytes of the states that a stage owns: masters, moments, compute copies and gradients. Imports no JAX.

A run counts them in its arrays (`memory.counted_states`), the planner by numbers of parameters (`state_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from mmjax.pipeline.config import OffloadConfig

MASTER, MOMENTS = 4, 8
"""Bytes of a parameter's float32 master, and of its two moments. A frozen one has a copy instead, perhaps of another
dtype."""
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class StateBytes(Generic[Number]):
    """Bytes of a stage's states on one of its devices.

    Attributes:
      masters: float32 masters, and the copies that frozen modules are held as.
      optimizer: masters and moments.
      copies: compute copies; where masters serve as they are, only weights that other stages lend.
      sums: sums of gradients over microbatches.
      reduced: reduced gradients, which live from reduce to update; 0 where they take the memory of the sums.
      served: those masters that serve as compute parameters.
      frozen: those masters that nothing updates.
    """

    masters: Number
    optimizer: Number
    copies: Number
    sums: Number
    reduced: Number
    served: Number
    frozen: Number

    @property
    def moments(self) -> Number:
        """The moments of what is trained."""
        return self.optimizer - self.masters

    @property
    def parameters(self) -> Number:
        """Compute parameters: copies, and masters that serve."""
        return self.copies + self.served

    def away(self, offload: OffloadConfig) -> tuple[Number, Number]:
        """Bytes of masters and moments, and of compute parameters, that are in host memory at times.

        Masters that serve count as compute parameters.
        """
        return (self.optimizer - self.served) * offload.optimizer, self.parameters * offload.parameters


def given_in(held: str, dtype: str) -> str:
    """The dtype in which steps that compute in ``dtype`` are given parameters that are held in another.

    A narrower one stays as it is, and is widened where it is used; that is exact. float32 holds all others, and no two
    of those hold one another.

    Args:
      held: the dtype of masters.
      dtype: that of the computation.
    """
    return held if dtype == "float32" else dtype


def state_bytes(
    parameters: float, trained: float, *, item: int, gradient: int = 4, shards: int = 1, frozen: int = 0
) -> StateBytes[float]:
    """Bytes of the states of some parameters of a device.

    Args:
      parameters: number of parameters.
      trained: number of those that have gradients and moments; the others are frozen.
      item: bytes of a number in computation.
      gradient: bytes of a number in the sums of gradients.
      shards: number of ranks among which masters and moments are sharded (ZeRO-1).
      frozen: bytes of a number of what is frozen; 0 takes those of the computation.
    """
    frozen = frozen or item
    numbers = {MASTER: trained}
    numbers[frozen] = numbers.get(frozen, 0.0) + parameters - trained
    given = sum(min(held, item) * number for held, number in numbers.items())
    served = sum(held * number for held, number in numbers.items() if held <= item and shards == 1)
    masters, sums = sum(held * number for held, number in numbers.items()) / shards, trained * gradient
    return StateBytes(
        masters=masters,
        optimizer=masters + trained * MOMENTS / shards,
        copies=given - served,
        sums=sums,
        reduced=sums / shards if shards > 1 else 0.0,
        served=served,
        frozen=(parameters - trained) * frozen / shards,
    )
