"""The configuration of checkpoints, and their errors. It imports no JAX, so that mistakes are reported at once."""

from __future__ import annotations

import dataclasses

from mmjax.configurable import configurable, not_negative, positive, require
from mmjax.sigterm import GRACE
from mmjax.weights.pipelines import Pipeline, module_folder

FRESH = "fresh"
"""The value of `init_from` for fresh values instead of a folder."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message is one line: the checkpoint, the reason and the fix."""


class TornCheckpointError(CheckpointError):
    """A checkpoint directory is torn, truncated or not one of mmjax's."""


@configurable("Checkpoint")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of a run: how often, how many, and the start of a new run.

    Attributes:
      every: steps between checkpoints; 0 saves at the end of the run only, be it by Ctrl-C or SIGTERM.
      keep: how many checkpoints stay on disk; older ones are deleted after a newer one is complete.
      best: a figure of evaluations, such as 'loss' (lower is better) or 'exact_match' (higher is better); the
        checkpoint with the best figure is kept beside the newest ones. '' keeps none.
      copy_frozen: whether checkpoints have a copy of frozen modules that started with parameters of a folder, of mmjax
        or of safetensors; False stores the name of that folder and checksums instead, so the folder must not change.
      init_from: a run, checkpoint or export whose parameters a new run starts with; a module's own is in Weights.
      grace_seconds: most seconds from SIGTERM to the end of a process, enough for the running step and a checkpoint. A
        cluster must wait longer before it kills; files that mmjax writes for a cluster say so.
    """

    every: int = 500
    keep: int = 3
    best: str = dataclasses.field(default="", metadata={"example": "loss"})
    copy_frozen: bool = True
    init_from: str = dataclasses.field(default="", metadata={"example": "runs/stage1"})
    grace_seconds: float = GRACE

    def __post_init__(self) -> None:
        not_negative("Checkpoint.every", self.every)
        positive("Checkpoint.keep", self.keep)
        positive("Checkpoint.grace_seconds", self.grace_seconds, GRACE)


@configurable("Weights")
@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """The parameters that a module has when a run begins; a run that continues keeps its own.

    Attributes:
      init_from: a run, checkpoint or export that has the module; 'fresh' for new values, '' for Checkpoint.init_from.
      path: a folder as save_pretrained writes it (config.json and safetensors), of the module or of a whole model that
        has it; the module's settings come from it too. For a generator also a pipeline's folder of diffusers, whose
        denoiser, scheduler and autoencoder it takes. '' for Model.weights.
      layer: the layer whose output is the features of a vision tower from path, like LLaVA's vision_feature_layer: -2
        is the last but one, without norms behind it; 0 is the tower's own output.
      new_tokens: texts that become tokens of their own behind the tokenizer's, for the language model; the tables of
        embeddings get a fresh row for each token that has none in the folder.
    """

    init_from: str = dataclasses.field(default="", metadata={"example": "runs/stage1"})
    path: str = dataclasses.field(default="", metadata={"example": "models/vicuna-7b"})
    layer: int = dataclasses.field(default=0, metadata={"example": -2})
    new_tokens: tuple[str, ...] = dataclasses.field(default=(), metadata={"example": ("<tool>", "</tool>")})

    def __post_init__(self) -> None:
        fix = f"Weights.path={self.path!r} is another start; leave one of them ''"
        require(not (self.init_from and self.path), "Weights.init_from", self.init_from, fix)
        fix = "is of a tower's own folder; name that in Weights.path, or leave this 0"
        require(bool(self.path) or not self.layer, "Weights.layer", self.layer, fix)
        require(all(self.new_tokens), "Weights.new_tokens", self.new_tokens, "has an empty text; leave it out")

    def folder(self, whole: str) -> str:
        """The folder of safetensors that parameters are read from: ``path``, or without any start of its own ``whole``.

        It is "" for none, also with ``init_from``. Of a pipeline in ``path`` it is the denoiser's.

        Args:
          whole: a folder of a whole model that has the module, as in ``Model.weights``; "" for none.
        """
        return module_folder(self.path) if self.path or self.init_from else whole

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline of ``diffusers`` that ``path`` names; ``None`` if it names none."""
        return Pipeline.find(self.path)

    def folder_setting(self, module: str) -> str:
        """The gin setting that names the folder of safetensors of ``module``: "llm/Weights.path" or "Model.weights"."""
        return f"{module}/Weights.path" if self.path else "Model.weights"
