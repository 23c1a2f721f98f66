"""Settings that all generators share: the noise process that they learn, and how they draw. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mmjax.configurable import not_negative, one_of, positive, require
from mmjax.data.process import Process, ProcessSettings
from mmjax.models.guidance import Guidance
from mmjax.models.samplers import SAMPLERS, SPACINGS, Sampler


@dataclass(frozen=True, kw_only=True)
class Diffusion(ProcessSettings):
    """Settings of a generator that makes a medium of noise.

    Attributes:
      loss_weight: weight of its loss beside the LLM's.
      sampler: the method of drawing: ``euler`` for flows; ``ddim`` or ``dpm++`` (DPM-Solver++ of second order) for
        ddpm.
      steps: number of steps from noise to a picture.
      spacing: timesteps of a ddpm's steps, as ``diffusers`` names them: ``leading``, ``trailing`` or ``linspace``.
      steps_offset: what is added to ``leading`` timesteps; folders of Stable Diffusion have 1.
      end_clean: whether the last step of ``ddim`` ends without noise, or with that of the first timestep.
      eta: the share of fresh noise in each step of ``ddim``: 0 draws without, 1 as ddpm does.
      clip: the bound of the medium that a step of ``ddim`` predicts; 0 for none.
      terminal_time: the last time at which a flow predicts, to which its times are stretched; 0 leaves them.
      guidance: the share of the condition in a prediction: 1 adds nothing, more draws away from what is drawn without
        it.
      guidance_rescale: the share of a guided prediction whose deviation is that of the unguided one.
    """

    loss_weight: float = 1.0
    sampler: str = "euler"
    steps: int = 20
    spacing: str = "leading"
    steps_offset: int = 0
    end_clean: bool = True
    eta: float = 0.0
    clip: float = 0.0
    terminal_time: float = 0.0
    guidance: float = 1.0
    guidance_rescale: float = 0.0

    def check_diffusion(self, scope: str) -> None:
        """Raises ``ConfigError`` unless the settings fit together; ``scope`` is their name in gin, such as "DiT"."""
        self.check_process(scope)
        not_negative(f"{scope}.loss_weight", self.loss_weight)
        samplers = SAMPLERS[self.process]
        fix = f"{scope}.process={self.process!r} is drawn by {' or '.join(map(repr, samplers))}"
        require(self.sampler in samplers, f"{scope}.sampler", self.sampler, fix)
        positive(f"{scope}.steps", self.steps)
        one_of(f"{scope}.spacing", self.spacing, SPACINGS)
        for name in ("steps_offset", "eta", "clip", "guidance"):
            not_negative(f"{scope}.{name}", getattr(self, name))
        require(self.eta <= 1, f"{scope}.eta", self.eta, "must be at most 1, such as 0.0")
        fix = "must be a time below 1, such as 0.02, or 0"
        require(0 <= self.terminal_time < 1, f"{scope}.terminal_time", self.terminal_time, fix)
        fix = "must be a share, from 0 to 1, such as 0.7"
        require(0 <= self.guidance_rescale <= 1, f"{scope}.guidance_rescale", self.guidance_rescale, fix)
        if self.process == "ddpm":
            # DPM-Solver++ leaves out the last of leading and linspaced timesteps.
            most = self.train_steps - (self.sampler == "dpm++" and self.spacing != "trailing")
            fix = f"a ddpm of {scope}.train_steps={self.train_steps} has at most {most} steps; use 20"
            require(self.steps <= most, f"{scope}.steps", self.steps, fix)
            first = int(self.drawing.timesteps[0])
            fix = f"timesteps of {self.steps} steps begin at {first}, and {scope}.train_steps={self.train_steps}; use 0"
            require(first < self.train_steps, f"{scope}.steps_offset", self.steps_offset, fix)

    def idle_diffusion(self, scope: str) -> dict[str, str]:
        """The reason why nothing reads a setting, by field; ``scope`` is as in ``check_diffusion``."""
        reasons = self.idle_process(scope)
        timesteps = ("spacing", "steps_offset")
        of_ddim = ("end_clean", "eta", "clip")
        if self.process == "flow":
            why = f"{scope}.process='flow' has no timesteps; set it to 'ddpm'"
            reasons |= dict.fromkeys((*timesteps, *of_ddim), why)
        else:
            reasons["terminal_time"] = f"{scope}.process='ddpm' has timesteps"
            if self.spacing != "leading":
                reasons["steps_offset"] = f"{scope}.spacing={self.spacing!r} has no offset; set it to 'leading'"
            if self.sampler != "ddim":
                reasons |= dict.fromkeys(of_ddim, f"{scope}.sampler={self.sampler!r} does not read it")
        if not self.guided.is_on:
            reasons["guidance_rescale"] = f"{scope}.guidance=1.0 guides nothing; set it to 5.0"
        return reasons

    @property
    def noising(self) -> Process:
        """The noise process, for the data side."""
        return Process(**{field.name: getattr(self, field.name) for field in fields(Process)})

    @property
    def drawing(self) -> Sampler:
        """The sampler."""
        names = ("steps", "spacing", "steps_offset", "end_clean", "eta", "clip", "terminal_time")
        return Sampler(process=self.noising, kind=self.sampler, **{name: getattr(self, name) for name in names})

    @property
    def guided(self) -> Guidance:
        """The combination of predictions with and without the condition."""
        return Guidance(scale=self.guidance, rescale=self.guidance_rescale)
