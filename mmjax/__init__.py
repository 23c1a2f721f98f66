"""Trains multimodal LLMs in JAX, each module under its own parallel layout on its own devices.

The names below are the public Python interface; `docs/api.md` shows each of them in use. They are imported on first
use, so that `import mmjax` is instant and touches neither JAX nor a device. Everything else in the package may change
from one version to the next.
"""

import os
import signal
import sys
from typing import TYPE_CHECKING

from mmjax import sigterm
from mmjax.exports import exported
from mmjax.version import __version__ as __version__

if TYPE_CHECKING:
    from mmjax.checkpoint.config import CheckpointConfig as CheckpointConfig
    from mmjax.checkpoint.config import WeightsConfig as WeightsConfig
    from mmjax.config import load_config as load_config
    from mmjax.config.from_folder import from_hf as from_hf
    from mmjax.configurable import ConfigError as ConfigError
    from mmjax.configurable import divides as divides
    from mmjax.configurable import from_preset as from_preset
    from mmjax.configurable import positive as positive
    from mmjax.data.config import DataConfig as DataConfig
    from mmjax.data.config import LatentsConfig as LatentsConfig
    from mmjax.data.config import PackingConfig as PackingConfig
    from mmjax.data.config import VocoderConfig as VocoderConfig
    from mmjax.data.examples import Example as Example
    from mmjax.data.examples import Examples as Examples
    from mmjax.data.sources import Entry as Entry
    from mmjax.data.sources import Media as Media
    from mmjax.data.sources import Record as Record
    from mmjax.data.sources import SourceConfig as SourceConfig
    from mmjax.data.sources import Turn as Turn
    from mmjax.data.sources import Unusable as Unusable
    from mmjax.data.spec import DataSpec as DataSpec
    from mmjax.data.tasks.digits.config import DigitsConfig as DigitsConfig
    from mmjax.data.tasks.task import Task as Task
    from mmjax.data.tasks.task import TaskContext as TaskContext
    from mmjax.data.types import EncoderSpec as EncoderSpec
    from mmjax.data.types import Sample as Sample
    from mmjax.export.parameters import export_run as export_run
    from mmjax.mesh.boundary import Boundary as Boundary
    from mmjax.mesh.config import WorldConfig as WorldConfig
    from mmjax.mesh.layout import Layout as Layout
    from mmjax.mesh.world import World as World
    from mmjax.models.callbacks import Callbacks as Callbacks
    from mmjax.models.callbacks import reads as reads
    from mmjax.models.config import CallbacksConfig as CallbacksConfig
    from mmjax.models.config import ModelConfig as ModelConfig
    from mmjax.models.context import Context as Context
    from mmjax.models.dit.config import DiTConfig as DiTConfig
    from mmjax.models.dit.config import SoundDiTConfig as SoundDiTConfig
    from mmjax.models.flops import parameter_count as parameter_count
    from mmjax.models.graph import MultimodalModel as MultimodalModel
    from mmjax.models.graph import multimodal as multimodal
    from mmjax.models.latent_encoder.config import LatentEncoderConfig as LatentEncoderConfig
    from mmjax.models.layers import column_parallel as column_parallel
    from mmjax.models.layers import linear as linear
    from mmjax.models.layers import residual_init as residual_init
    from mmjax.models.layers import rotate_2d as rotate_2d
    from mmjax.models.layers import row_parallel as row_parallel
    from mmjax.models.llama.config import DecoderConfig as DecoderConfig
    from mmjax.models.lora.config import LoraConfig as LoraConfig
    from mmjax.models.mmdit.config import MMDiTConfig as MMDiTConfig
    from mmjax.models.module import LayerGroup as LayerGroup
    from mmjax.models.module import Loss as Loss
    from mmjax.models.module import Module as Module
    from mmjax.models.nodes import Edge as Edge
    from mmjax.models.nodes import Node as Node
    from mmjax.models.norms import rms_norm as rms_norm
    from mmjax.models.parameters import Part as Part
    from mmjax.models.projector.config import ProjectorConfig as ProjectorConfig
    from mmjax.models.settings import EqualHeads as EqualHeads
    from mmjax.models.settings import ModuleSettings as ModuleSettings
    from mmjax.models.settings import SquarePatches as SquarePatches
    from mmjax.models.temporal.config import TemporalConfig as TemporalConfig
    from mmjax.models.transformer import Affine as Affine
    from mmjax.models.transformer import EncoderLayer as EncoderLayer
    from mmjax.models.transformer import encoder_block as encoder_block
    from mmjax.models.unet.config import UNetConfig as UNetConfig
    from mmjax.models.vit.config import ViTConfig as ViTConfig
    from mmjax.models.whisper.config import WhisperConfig as WhisperConfig
    from mmjax.optimizer_config import OptimizerConfig as OptimizerConfig
    from mmjax.optimizer_config import adamw as adamw
    from mmjax.pipeline.config import OffloadConfig as OffloadConfig
    from mmjax.recipe import LoraSpec as LoraSpec
    from mmjax.recipe import ModelSpec as ModelSpec
    from mmjax.recipe import ModuleSpec as ModuleSpec
    from mmjax.recipe import ProjectorSpec as ProjectorSpec
    from mmjax.recipe import Recipe as Recipe
    from mmjax.recipe import TrainConfig as TrainConfig
    from mmjax.recipe.datasets import Datasets as Datasets
    from mmjax.recipe.datasets import messages as messages
    from mmjax.recipe.datasets import mixture as mixture
    from mmjax.recipe.model_spec import edge as edge
    from mmjax.recipe.schedules import ScheduleConfig as ScheduleConfig
    from mmjax.recipe.schedules import gpipe as gpipe
    from mmjax.recipe.schedules import interleaved as interleaved
    from mmjax.recipe.schedules import nested as nested
    from mmjax.recipe.schedules import one_f_one_b as one_f_one_b
    from mmjax.recipe.schedules import three_phase as three_phase
    from mmjax.recipe.schedules import zb_h1 as zb_h1
    from mmjax.recipe.specs import encoder as encoder
    from mmjax.recipe.specs import generator as generator
    from mmjax.recipe.specs import language_model as language_model
    from mmjax.run import Run as Run
    from mmjax.run import build as build
    from mmjax.schedule.dispatch import dispatch_table as dispatch_table
    from mmjax.schedule.schedules import make_schedule as make_schedule
    from mmjax.schedule.simulate import Costs as Costs
    from mmjax.schedule.simulate import simulate as simulate
    from mmjax.schedule.timeline import draw_timeline as draw_timeline
    from mmjax.train.results import TrainResult as TrainResult
    from mmjax.train.trainer import Trainer as Trainer
    from mmjax.viz.answers import draw_answers as draw_answers
    from mmjax.viz.layout import draw_layout as draw_layout

__all__ = [
    "Affine",
    "Boundary",
    "Callbacks",
    "CallbacksConfig",
    "CheckpointConfig",
    "ConfigError",
    "Context",
    "Costs",
    "DataConfig",
    "DataSpec",
    "Datasets",
    "DecoderConfig",
    "DiTConfig",
    "DigitsConfig",
    "Edge",
    "EncoderLayer",
    "EncoderSpec",
    "Entry",
    "EqualHeads",
    "Example",
    "Examples",
    "LatentEncoderConfig",
    "LatentsConfig",
    "LayerGroup",
    "Layout",
    "LoraConfig",
    "LoraSpec",
    "Loss",
    "MMDiTConfig",
    "Media",
    "ModelConfig",
    "ModelSpec",
    "Module",
    "ModuleSettings",
    "ModuleSpec",
    "MultimodalModel",
    "Node",
    "OffloadConfig",
    "OptimizerConfig",
    "PackingConfig",
    "Part",
    "ProjectorConfig",
    "ProjectorSpec",
    "Recipe",
    "Record",
    "Run",
    "Sample",
    "ScheduleConfig",
    "SoundDiTConfig",
    "SourceConfig",
    "SquarePatches",
    "Task",
    "TaskContext",
    "TemporalConfig",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "Turn",
    "UNetConfig",
    "Unusable",
    "ViTConfig",
    "VocoderConfig",
    "WeightsConfig",
    "WhisperConfig",
    "World",
    "WorldConfig",
    "adamw",
    "build",
    "column_parallel",
    "dispatch_table",
    "divides",
    "draw_answers",
    "draw_layout",
    "draw_timeline",
    "edge",
    "encoder",
    "encoder_block",
    "export_run",
    "from_hf",
    "from_preset",
    "generator",
    "gpipe",
    "interleaved",
    "language_model",
    "linear",
    "load_config",
    "make_schedule",
    "messages",
    "mixture",
    "multimodal",
    "nested",
    "one_f_one_b",
    "parameter_count",
    "positive",
    "reads",
    "residual_init",
    "rms_norm",
    "rotate_2d",
    "row_parallel",
    "simulate",
    "three_phase",
    "zb_h1",
]

# The imports above, which `__getattr__` makes on first use.
_NAMES_OF = {
    "mmjax.checkpoint.config": ("CheckpointConfig", "WeightsConfig"),
    "mmjax.config": ("load_config",),
    "mmjax.config.from_folder": ("from_hf",),
    "mmjax.configurable": ("ConfigError", "divides", "from_preset", "positive"),
    "mmjax.data.config": ("DataConfig", "LatentsConfig", "PackingConfig", "VocoderConfig"),
    "mmjax.data.examples": ("Example", "Examples"),
    "mmjax.data.sources": ("Entry", "Media", "Record", "SourceConfig", "Turn", "Unusable"),
    "mmjax.data.spec": ("DataSpec",),
    "mmjax.data.tasks.digits.config": ("DigitsConfig",),
    "mmjax.data.tasks.task": ("Task", "TaskContext"),
    "mmjax.data.types": ("EncoderSpec", "Sample"),
    "mmjax.export.parameters": ("export_run",),
    "mmjax.mesh.boundary": ("Boundary",),
    "mmjax.mesh.config": ("WorldConfig",),
    "mmjax.mesh.layout": ("Layout",),
    "mmjax.mesh.world": ("World",),
    "mmjax.models.callbacks": ("Callbacks", "reads"),
    "mmjax.models.config": ("CallbacksConfig", "ModelConfig"),
    "mmjax.models.context": ("Context",),
    "mmjax.models.dit.config": ("DiTConfig", "SoundDiTConfig"),
    "mmjax.models.flops": ("parameter_count",),
    "mmjax.models.graph": ("MultimodalModel", "multimodal"),
    "mmjax.models.layers": ("column_parallel", "linear", "residual_init", "rotate_2d", "row_parallel"),
    "mmjax.models.llama.config": ("DecoderConfig",),
    "mmjax.models.latent_encoder.config": ("LatentEncoderConfig",),
    "mmjax.models.lora.config": ("LoraConfig",),
    "mmjax.models.mmdit.config": ("MMDiTConfig",),
    "mmjax.models.module": ("LayerGroup", "Loss", "Module"),
    "mmjax.models.nodes": ("Edge", "Node"),
    "mmjax.models.norms": ("rms_norm",),
    "mmjax.models.parameters": ("Part",),
    "mmjax.models.projector.config": ("ProjectorConfig",),
    "mmjax.models.settings": ("EqualHeads", "ModuleSettings", "SquarePatches"),
    "mmjax.models.temporal.config": ("TemporalConfig",),
    "mmjax.models.transformer": ("Affine", "EncoderLayer", "encoder_block"),
    "mmjax.models.unet.config": ("UNetConfig",),
    "mmjax.models.vit.config": ("ViTConfig",),
    "mmjax.models.whisper.config": ("WhisperConfig",),
    "mmjax.optimizer_config": ("OptimizerConfig", "adamw"),
    "mmjax.pipeline.config": ("OffloadConfig",),
    "mmjax.recipe": ("LoraSpec", "ModelSpec", "ModuleSpec", "ProjectorSpec", "Recipe", "TrainConfig"),
    "mmjax.recipe.datasets": ("Datasets", "messages", "mixture"),
    "mmjax.recipe.schedules": (
        "ScheduleConfig",
        "gpipe",
        "interleaved",
        "nested",
        "one_f_one_b",
        "three_phase",
        "zb_h1",
    ),
    "mmjax.recipe.model_spec": ("edge",),
    "mmjax.recipe.specs": ("encoder", "generator", "language_model"),
    "mmjax.run": ("Run", "build"),
    "mmjax.schedule.dispatch": ("dispatch_table",),
    "mmjax.schedule.schedules": ("make_schedule",),
    "mmjax.schedule.simulate": ("Costs", "simulate"),
    "mmjax.schedule.timeline": ("draw_timeline",),
    "mmjax.train.results": ("TrainResult",),
    "mmjax.train.trainer": ("Trainer",),
    "mmjax.viz.answers": ("draw_answers",),
    "mmjax.viz.layout": ("draw_layout",),
}


__getattr__ = exported(__name__, _NAMES_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _end_at_ctrl_c() -> None:
    """Makes Ctrl-C and SIGTERM end the process at once while `python -m mmjax.…` or `mmjax …` starts.

    Imports of JAX would often drop the exception of Ctrl-C. The command itself handles both, see `one_line_errors`.
    """
    program = sys.argv[0] if sys.argv else ""
    if program == "-m" or program.endswith(f"{os.sep}mmjax"):
        sigterm.end_from_the_start()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


_end_at_ctrl_c()
