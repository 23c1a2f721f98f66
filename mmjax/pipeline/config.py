"""Configuration of offloading. Imports no JAX, so that errors in it are reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from mmjax.configurable import configurable, require
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.models.families import Role
from mmjax.schedule.schedules import NESTING, OFFLOADING, STASHING, WINDOWED


@configurable("Offload")
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Arrays of a module that are moved to pinned host memory while its devices work for other modules.

    Attributes:
      activations: residuals of an encoder, of microbatches between forward and backward.
      parameters: compute parameters, while other modules on the same devices run between this one's forward and
        backward.
      optimizer: moments from an update to the next reduce, masters from prepare to reduce.
    """

    activations: bool = False
    parameters: bool = False
    optimizer: bool = False

    def check(self, name: str, role: Role, layout: Layout, *, llm: Layout, schedule: str) -> None:
        """Requires that a module waits under the schedule while something of it is away.

        An encoder waits between its forward and its backward, if the schedule leaves time there.

        Args:
          name: the module's name, and the scope of these settings.
          role: its role in the model.
          layout: its layout.
          llm: the LLM's layout.
          schedule: the value of ``Train.schedule``.

        Raises:
          ConfigError: it does not wait, or has lanes that copy shards of parameters.
        """
        if self.activations:
            never = {
                "llm": f"the {LLM}'s microbatches do not wait between forward and backward",
                "generator": "a generator's backward follows its forward at once",
            }
            require(role not in never, f"{name}/Offload.activations", value=True, fix=f"{never.get(role)}; {_OFF}")
            _check_wait(f"{name}/Offload.activations", name, layout, llm, schedule, STASHING)
            fix = f"without lanes it runs beside the {LLM} and keeps little; {_OFF}, or {name}/Layout.lanes to {llm.pp}"
            is_busy = layout.lanes > 1 or schedule not in NESTING
            require(is_busy, f"{name}/Offload.activations", value=True, fix=fix)
        if self.parameters:
            fix = f"the lanes' parameters are shards between ops, and copied for each; {_OFF}"
            is_whole = layout.lanes == 1 or not layout.shards_parameters
            require(is_whole, f"{name}/Offload.parameters", value=True, fix=fix)
            never = {
                "llm": f"the {LLM}'s parameters are read all the time",
                "generator": "a generator runs between others' ops under every schedule",
            }
            require(role not in never, f"{name}/Offload.parameters", value=True, fix=f"{never.get(role)}; {_OFF}")
            _check_wait(f"{name}/Offload.parameters", name, layout, llm, schedule, OFFLOADING)


_OFF = "set it to False"


def _check_wait(field: str, module: str, layout: Layout, llm: Layout, schedule: str, schedules: Sequence[str]) -> None:
    """Requires that an encoder waits under the schedule, one of those under which encoders wait."""
    fix = f"Train.schedule={schedule!r} leaves no time for it; {_OFF}, or the schedule to {schedules[0]!r}"
    require(schedule in schedules, field, value=True, fix=fix)
    shares = not set(layout.ranks).isdisjoint(llm.ranks)
    fix = f"shares no rank with {LLM} and so has no phase of its own; {_OFF}, or {module}/Layout.rank_offset to"
    require(shares or schedule not in WINDOWED, field, value=True, fix=f"{fix} {llm.rank_offset}")


OFFLOAD_KINDS = tuple(field.name for field in fields(OffloadConfig))
"""Kinds of a module's arrays that can be offloaded."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
      temperature: divisor of the logits; 0 takes the most likely token.
      top_p: probability mass of the most likely tokens to choose from; 1 is all tokens.
      seed: seed of the random numbers. The text depends on the seed, not on the layout or on other rows.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
