"""Schedules of a step as settings: the order of its ops, and the microbatches that it is cut into."""

from __future__ import annotations

from dataclasses import dataclass

from mmjax.schedule.schedules import ONE_F_ONE_B


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The order of a step's ops.

    Attributes:
      name: one of the schedules of ``Train.schedule``, such as "1f1b".
      microbatches: ops that a step's samples are cut into; divides the batch.
      inner: the LLM's own schedule inside a nested one.
      window: microbatches between whose encoder forward and backward the LLM runs, of three-phase; 0 is all.
    """

    name: str = ONE_F_ONE_B
    microbatches: int = 4
    inner: str = ONE_F_ONE_B
    window: int = 0


def one_f_one_b(microbatches: int) -> ScheduleConfig:
    """Each stage alternates forwards and backwards of ``microbatches`` (Narayanan et al., "PipeDream")."""
    return ScheduleConfig(microbatches=microbatches)


def gpipe(microbatches: int) -> ScheduleConfig:
    """All forwards, then all backwards (Huang et al., "GPipe")."""
    return ScheduleConfig(name="gpipe", microbatches=microbatches)


def interleaved(microbatches: int) -> ScheduleConfig:
    """1F1B over several chunks of layers a rank (Narayanan et al., "Megatron-LM"); set ``Layout.chunks``."""
    return ScheduleConfig(name="interleaved", microbatches=microbatches)


def zb_h1(microbatches: int) -> ScheduleConfig:
    """1F1B whose weight gradients fill the bubble (Qi et al., "Zero Bubble", H1)."""
    return ScheduleConfig(name="zb-h1", microbatches=microbatches)


def three_phase(microbatches: int, *, window: int = 0) -> ScheduleConfig:
    """Encoders' forwards, the LLM's steps, encoders' backwards, over ``window`` microbatches at a time; 0 is all."""
    return ScheduleConfig(name="three-phase", microbatches=microbatches, window=window)


def nested(microbatches: int, *, inner: str = ONE_F_ONE_B) -> ScheduleConfig:
    """Lanes of encoders run in the gaps of the LLM's ``inner`` schedule; set ``Layout.lanes``."""
    return ScheduleConfig(name="nested", microbatches=microbatches, inner=inner)
