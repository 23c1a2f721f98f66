"""Bytes of a stage's states: masters, moments, compute copies and gradients. Imports no JAX.

A run counts them in its arrays (`memory.count_state_bytes`), the planner by numbers of parameters (`state_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from mmjax.pipeline.config import OffloadConfig

MASTER, MOMENTS = 4, 8
"""Bytes of a parameter's float32 master, and of its two moments. A frozen parameter has only its stored copy."""
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class StateBytes(Generic[Number]):
    """Bytes of a stage's states on one of its devices.

    Attributes:
      masters: float32 masters, and stored parameters of frozen modules.
      optimizer: masters and moments.
      copies: compute copies; if masters are used directly, only weights that other stages lend.
      sums: sums of gradients over microbatches.
      reduced: reduced gradients, which live from reduce to update; 0 if they overwrite the sums.
      direct: masters that are used directly as compute parameters.
      frozen: masters of frozen modules.
    """

    masters: Number
    optimizer: Number
    copies: Number
    sums: Number
    reduced: Number
    direct: Number
    frozen: Number

    @property
    def moments(self) -> Number:
        """Moments of trained modules."""
        return self.optimizer - self.masters

    @property
    def parameters(self) -> Number:
        """Compute parameters: copies, and masters that are used directly."""
        return self.copies + self.direct

    def __add__(self, states: StateBytes[Number]) -> StateBytes[Number]:
        """Bytes of both, by kind."""
        return StateBytes(**{f.name: getattr(self, f.name) + getattr(states, f.name) for f in fields(StateBytes)})

    def offloaded(self, offload: OffloadConfig) -> tuple[Number, Number]:
        """(bytes of masters and moments, bytes of compute parameters) that are offloaded during a step.

        Either is 0 if ``offload`` leaves it on the devices. Masters that are used directly count as compute parameters.
        """
        return (self.optimizer - self.direct) * offload.optimizer, self.parameters * offload.parameters


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """The states that ranks of an optimizer instance share beside masters and moments (``Layout.shard``).

    Attributes:
      sums: whether they share the sums of gradients.
      parameters: whether they share the compute parameters.
    """

    sums: bool = False
    parameters: bool = False


STATES_ALONE = Sharded()
"""What ``Layout.shard = 'states'`` shares."""


def param_dtype(master: str, compute: str) -> str:
    """The dtype of compute parameters: ``master`` if ``compute`` is "float32", else ``compute``.

    Masters in a narrower dtype than the computation are not cast, and are widened where they are used, which is exact.
    float32 is the only dtype that contains the others.

    Args:
      master: dtype of the masters, "float32", "bfloat16" or "float16".
      compute: dtype of the computation, "float32" or "bfloat16".
    """
    return master if compute == "float32" else compute


def state_bytes(
    parameters: float,
    trained: float,
    *,
    item: int,
    gradient: int = 4,
    shards: int = 1,
    frozen: int = 0,
    sharded: Sharded = STATES_ALONE,
    apart: int = 1,
    moments: int = MOMENTS,
) -> StateBytes[float]:
    """Bytes of the states of some parameters of a device, by kind.

    The kinds are ``masters``, ``optimizer`` (masters and moments), ``copies``, ``sums``, ``reduced``, ``direct`` and
    ``frozen``.

    Args:
      parameters: number of parameters.
      trained: number of trained parameters, with gradients and moments; the others are frozen.
      item: bytes of a compute parameter.
      gradient: bytes of a gradient in the sums.
      shards: number of ranks over which masters and moments are sharded (ZeRO-1).
      frozen: bytes of a stored frozen parameter; 0 means ``item``.
      sharded: what else these ranks share.
      apart: number of these ranks that have different parameters, as those of ep have different experts; it divides
        ``shards``, and ranks with the same parameters share them.
      moments: bytes of a trained parameter's moments and running mean.
    """
    frozen, sharers = frozen or item, shards // apart
    parts = sharers if sharded.parameters else 1  # of compute parameters
    is_direct = shards == 1 or sharded.parameters
    by_size = {MASTER: trained}  # number of parameters by bytes of a master
    by_size[frozen] = by_size.get(frozen, 0.0) + parameters - trained
    params = sum(min(size, item) * number for size, number in by_size.items()) / parts
    direct = sum(size * number for size, number in by_size.items() if size <= item and is_direct) / parts
    masters = sum(size * number for size, number in by_size.items()) / sharers
    sums = trained * gradient / (sharers if sharded.sums else 1)
    return StateBytes(
        masters=masters,
        optimizer=masters + trained * moments / sharers,
        copies=params - direct,
        sums=sums,
        reduced=sums / sharers if shards > 1 and not sharded.sums else 0.0,
        direct=direct,
        frozen=(parameters - trained) * frozen / sharers,
    )
