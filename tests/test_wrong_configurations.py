"""A user's mistake gives one line on stderr that names field, value and a legal value, before any device is touched."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trial_runs import REPOSITORY

ANNOUNCED = "building the model and tracing its programs\n"
"""What a train command prints once it has been at work for two seconds, as on a busy machine."""
SECONDS, EARLY_SECONDS = 20.0, 1.5
SERVE = "assembly.serve_flags"
NAMES = (
    "train",
    "check",
    "eval",
    "generate",
    "export",
    "bench",
    "plan",
    "profile",
    "inspect",
    SERVE,
    "launch",
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}  # commands run elsewhere: some make runs/ before they end
CONFIG = REPOSITORY / "configs" / "digits_vlm.gin"


@dataclass(frozen=True)
class Wrong:
    """A command line and what its message must have: the field with the value as it was written, and what is legal.

    `{d}` in any of them is the folder that `folder` makes; `binding` is short for a gin binding of `train`.
    """

    binding: str
    named: str
    legal: str
    command: str = "train"
    flags: tuple[str, ...] | None = None

    @property
    def late(self) -> bool:
        """Whether the data or a checkpoint has to be opened for it."""
        return self.named.startswith(LATE)

    def argv(self, folder: Path) -> list[str]:
        flags = (f"--gin_file={CONFIG}", "--run_dir={d}/run") if self.flags is None else self.flags
        written = [*flags, *([f"--gin.{self.binding}"] if self.binding else [])]
        return [flag.replace("{d}", str(folder)) for flag in written]


def command(name: str, *flags: str, named: str, legal: str) -> Wrong:
    return Wrong("", named, legal, name, flags)


APART = (
    *("Train.schedule='1f1b'", "llm/Layout.pp=2", "painter/Layout.lanes=1", "painter/Layout.rank_offset=6"),
    *("vision/Layout.dp=1", "vision/Layout.lanes=1", "vision/Layout.rank_offset=4"),
    *("audio/Layout.dp=1", "audio/Layout.lanes=1", "audio/Layout.rank_offset=5"),
)
"""Four modules, each on its own ranks."""


def drawing(binding: str, *given: str, named: str, legal: str) -> Wrong:
    """A wrong binding in the configuration that draws, with bindings that are right."""
    more = (f"--gin.{one}" for one in given)
    flags = (f"--gin_file={CONFIG.with_name('digits_draw.gin')}", "--run_dir={d}/run", *more)
    return Wrong(binding, named, legal, flags=flags)


def streams(*bindings: str, named: str, legal: str) -> Wrong:
    """Bindings that do not go together where a generator with two streams draws."""
    painter = ("Model.generators={'painter': 'mmdit'}", "Digits.draw=1.0", "painter/Layout.rank_offset=8")
    return train(*painter, *bindings, named=named, legal=legal)


def train(*bindings: str, named: str, legal: str) -> Wrong:
    """Several bindings that do not go together."""
    return Wrong(
        "", named, legal, flags=(f"--gin_file={CONFIG}", "--run_dir={d}/run", *(f"--gin.{one}" for one in bindings))
    )


GIVEN, CODED = f"--gin_file={CONFIG}", "--gin_file={d}/coded/config.gin"
ASKED = "--messages={d}/ask.json"
ONE = "{'a': 1.0}"
IN = ("Data.cache='{d}/cache'", "a/Source.path='{d}/images/data.jsonl'")
# What follows Data.sources, the message's field and value, and what is legal.
SOURCES = [
    ("{'a b': 1.0}", (), "Data.sources='a b'", "must be a name, such as 'mine'"),
    ("{'a': 0.0}", (), "Data.sources['a']=0.0: must be above 0", "such as 1.0"),
    ("{'a': 1.0, 'b': 0.00001}", ("b/Source.path='{d}/text'",), "Data.sources=", "leave it out or give it more"),
    (ONE, (), "a/Source.path=''", "such as 'data.json'"),
    (ONE, ("a/Source.path='{d}/no.json'",), "a/Source.path='{d}/no.json'", "name the file or files of the data"),
    (
        ONE,
        ("a/Source.path='{d}/*.tar'", "a/Source.kind=webdataset"),
        "a/Source.path='{d}/*.tar'",
        "a pattern that fits",
    ),
    (ONE, ("a/Source.path='s4://x/y.json'",), "Source.path='s4://...'", "Protocol not known"),
    (ONE, ("a/Source.kind=parquett",), "a/Source.kind='parquett'", "did you mean 'parquet'?"),
    (ONE, ("a/Source.kind='spy:Reader'",), "a/Source.kind='spy:Reader': names code that would", "add --allow_code"),
    (ONE, ("a/Source.template=vicunna",), "a/Source.template='vicunna'", "did you mean 'vicuna'?"),
    (ONE, ("a/Source.pieces={'question': 'Q'}",), "a/Source.pieces['question']='Q'", "such as 'USER: {text} '"),
    (ONE, ("a/Source.pieces={'ask': '{text}'}",), "a/Source.pieces={'ask': '{text}'}", "a template has no 'ask'"),
    (ONE, (*IN, "a/Source.template=folder"), "a/Source.template='folder': Data.tokenizer=''", "such as 'chatml'"),
    (ONE, ("a/Source.resample=cubic",), "a/Source.resample='cubic'", "'bicubic'"),
    (ONE, ("a/Source.max_pixels=10", "a/Source.min_pixels=20"), "a/Source.min_pixels=20", "Source.max_pixels (10)"),
    (ONE, ("a/Source.preset=llava",), "a/Source.preset='llava'", "'llava15'"),
    (ONE, ("a/Source.resize=tiles",), "a/Source.resize='tiles'", "'budget', 'fixed', 'anyres'"),
    (ONE, (*IN, "a/Source.resize=fixed", "a/Source.size=(30, 30)"), "a/Source.size=(30, 30)", "such as (32, 32)"),
    (ONE, ("a/Source.mean=(0.5,)",), "a/Source.std=()", "as many values as Source.mean (1)"),
    (ONE, (*IN, "a/Source.preset=clip"), "a/Source.mean=", "the encoder takes 1 channels"),
    (ONE, (*IN, "a/Source.max_patches=1"), "a/Source.max_patches=1", "must be 4 or more"),
    (ONE, ("a/Source.pixel_limit=1000000000",), "a/Source.pixel_limit=1000000000", "at most 89478485"),
    (ONE, ("a/Source.grids=((1, 0),)",), "a/Source.grids=((1, 0),)", "such as ((1, 2), (2, 1), (2, 2))"),
    (
        ONE,
        ("Data.cache='{d}/cache'", "a/Source.path='{d}/one.jsonl'", "a/Source.held_out=1"),
        "a/Source.held_out=1",
        "set it to 0",
    ),
    (ONE, (*IN, "Data.cache='{d}/text/x'"), "Data.cache='{d}/text/x'", "name another directory"),
]
CASES = [
    # unknown names
    Wrong("Train.stepz=3", "Train.stepz=3: Train has no field 'stepz'", "did you mean 'steps'?"),
    Wrong("Trian.steps=3", "Trian.steps=3: no configurable 'Trian'", "did you mean 'Train'?"),
    Wrong("visoin/Layout.tp=2", "visoin/Layout.tp=2: Layout has no scope 'visoin'", "did you mean 'vision'?"),
    Wrong("vision/Decoder.layers=2", "vision/Decoder.layers=2: Decoder has no scope 'vision'", "use 'llm'"),
    Wrong("llm/Train.steps=3", "llm/Train.steps=3: Train has no scope 'llm'", "write Train.steps"),
    Wrong("steps=3", "--gin.steps=3: no value is %steps", "such as Train.steps"),
    Wrong("Layout.dq=2", "Layout.dq=2: Layout has no field 'dq'", "'lanes', 'copies', 'microbatches'"),
    Wrong("Data.image_encoder=visoin", "Data.image_encoder='visoin'", "did you mean 'vision'?"),
    Wrong("Data.reorder=disttrian", "Data.reorder='disttrian'", "did you mean 'disttrain'?"),
    Wrong("Digits.calls=(1, 1)", "Data.audio_encoder='audio': no encoder of the model takes recordings", "add one"),
    Wrong("Digits.images=(0, 2)", "Digits.images=(0, 2): a sample may be empty", "set it to (1, 1)"),
    Wrong("vision/Projector.inject=(2, 0)", "vision/Projector.inject=(2, 0): must be rising", "such as (0, 2)"),
    Wrong(
        "vision/Projector.levels=(1,)",
        "vision/Projector.levels=(1,): must be a layer of the encoder for each of Projector.inject=()",
        "or ()",
    ),
    command(
        "train", GIVEN, "--gin.vision/Projector.inject=(0,)", "--gin.vision/Projector.levels=(4,)",
        named="vision/Projector.levels=(4,): vision has layers 0 to ", legal="use numbers of these",
    ),
    Wrong("vision/Projector.inject=(0, 9)", "vision/Projector.inject=(0, 9): the LLM has layers 0 to 2", "use (0, 2)"),
    Wrong("Digits.noise=(-1.0, 1.0)", "Digits.noise=(-1.0, 1.0): must ascend", "such as (0.0, 0.2)"),
    Wrong("llm/Callbacks.befor='a:b'", "llm/Callbacks.befor='a:b': Callbacks has no field", "'before'"),
    Wrong("llm/Callbacks.before='mark'", "llm/Callbacks.before='mark': names no function", "'package.module:function'"),
    Wrong("llm/Callbacks.before='spy:mark'", "llm/Callbacks.before='spy:mark': names code", "add --allow_code"),
    Wrong("vison/Callbacks.after='a:b'", "vison/Callbacks.after='a:b': Callbacks has no", "did you mean 'vision'?"),
    Wrong("Model.encoders={'vision': 'vti'}", "Model.encoders['vision']='vti'", "use one of vit"),
    Wrong("Model.encoders={}", "ViT.layers=2: ViT has no scope 'vision'", "add 'vision': 'vit' to Model.encoders"),
    Wrong("Model.encoders={'vi sion': 'vit'}", "Model.encoders='vi sion'", "such as 'vision'"),
    Wrong("Model.generators={'painter': 'dti'}", "Model.generators['painter']='dti': not a gener", "one of llama, dit"),
    Wrong("Model.generators={'llm': 'dit'}", "Model.generators='llm': must be", "other than 'llm', such as 'painter'"),
    Wrong("Model.generators={'vision': 'dit'}", "Model.generators='vision': is the name of an", "such as 'vision2'"),
    Wrong(
        "Model.generators={'vision_projector': 'dit'}", "Model.generators='vision_projector': is the name of vision's",
        "such as 'vision_projector2'",
    ),
    Wrong("Digits.draw=1.0", "Digits.draw=1.0: nothing in the model draws", "Model.generators to {'painter': 'dit'}"),
    Wrong("Digits.draw=-1.0", "Digits.draw=-1.0: must be 0 or more", "such as 0"),
    Wrong("painter/DiT.layers=3", "painter/DiT.layers=3: DiT has no scope", "add 'painter': 'dit' to Model.generators"),
    drawing(
        "Digits.draw=0.0", named="Model.generators={'painter': 'dit'}: the data have no picture for 'painter' to draw",
        legal="leave it out, or set painter/Optimizer.frozen to True, or Digits.draw to 1.0",
    ),
    drawing("Data.generator=drawer", named="Data.generator='drawer'", legal="legal: 'painter'"),
    drawing("painter/DiT.layer=3", named="painter/DiT.layer=3: DiT has no field", legal="did you mean 'layers'?"),
    drawing("vision/DiT.layers=3", named="vision/DiT.layers=3: DiT has no scope 'vision'", legal="use 'painter'"),
    drawing("painter/DiT.heads=3", named="painter/DiT.heads=3: must divide DiT.width (64)", legal="such as 4"),
    drawing("painter/DiT.heads=32", named="painter/DiT.heads=32: must divide a quarter of DiT.w", legal="such as 16"),
    drawing("painter/DiT.loss_weight=-1", named="painter/DiT.loss_weight=-1.0: must be 0", legal="such as 0"),
    drawing("painter/DiT.queries=2", named="painter/DiT.merge=4: DiT.queries=2 tokens stand", legal="set it to 1"),
    drawing(
        "painter/DiT.queries=2", "painter/DiT.merge=1", *APART, "painter/Layout.tp=2", "painter/Layout.dp=1",
        named="painter/Layout.sp=True: a row is a condition (painter/DiT.queries=2)", legal="set it to False",
    ),
    streams("painter/MMDiT.heads=16", named="painter/MMDiT.width=64: must be an even number", legal="such as 256"),
    streams("painter/MMDiT.rope=(4, 6)", named="painter/MMDiT.rope=(4, 6): needs three even numbers", legal="or is ()"),
    streams("painter/MMDiT.queries=0", named="painter/MMDiT.queries=0: must be above 0", legal="such as 1"),
    streams(
        "painter/MMDiT.queries=3", "painter/Layout.tp=2",
        named="painter/MMDiT.queries=3: painter/Layout.tp=2 ranks share its places", legal="use a multiple",
    ),
    streams("painter/MMDiT.merge=2", named="painter/MMDiT.merge=2: MMDiT has no field 'merge'", legal="'queries'"),
    drawing("painter/DiT.steps=0", named="painter/DiT.steps=0: must be above 0", legal="such as 1"),
    drawing("painter/DiT.preset=dit", named="painter/DiT.preset='dit'", legal="'dit-xl2'"),
    drawing("painter/DiT.remat=all", named="painter/DiT.remat='all'", legal="'none', 'dots', 'full'"),
    drawing("painter/Projector.inject=(0,)", named="painter/Projector.inject=(0,): a generator", legal="set it to ()"),
    drawing("painter/Layout.tp=8", named="painter/Layout.tp=8: must divide painter/DiT.heads (4)", legal="use 4"),
    drawing("painter/Layout.pp=9", *APART, named="painter/Layout.pp=9: a stage needs a layer", legal="use 3"),
    drawing("painter/Layout.rank_offset=3", *APART, named="painter's ranks 3-4 share rank 4", legal="use 5"),
    drawing("painter/Packing.buckets=((1, 18),)", named="painter/Packing.buckets: rows of 18", legal="such as 32"),
    drawing(
        "painter/Offload.parameters=True",
        *APART,
        named="painter/Offload.parameters=True: a generator runs between",
        legal="set it to False",
    ),
    Wrong(
        "llm/Decoder.mask='text sees visoin before'",
        "llm/Decoder.mask='text sees visoin before': no tokens are 'visoin'",
        "did you mean 'vision'?",
    ),
    Wrong("llm/Decoder.mask=gemma2", "llm/Decoder.mask='gemma2'", "did you mean 'gemma3'?"),
    Wrong("llm/Decoder.mask='all sees all behind'", "llm/Decoder.mask='all sees all behind'", "'everywhere'"),
    Wrong("llm/Decoder.full_every=2", "llm/Decoder.full_every=2: the other layers have no window", "such as 4096"),
    # choices
    Wrong("Train.schedule=1f1", "Train.schedule='1f1'", "did you mean '1f1b'?"),
    Wrong("Train.schedule=zb", "Train.schedule='zb'", "'1f1b', 'gpipe', 'interleaved', 'eager-1f1b', 'zb-h1'"),
    Wrong("Train.window=2", "Train.window=2", "must be 0 for Train.schedule='1f1b'; three-phase has windows"),
    Wrong("Train.inner=zb-h2", "Train.inner='zb-h2'", "did you mean 'zb-h1'?"),
    Wrong(
        "Train.inner=zb-h1", "Train.inner='zb-h1'",
        "must be '1f1b' for Train.schedule='1f1b'; three-phase and nested have one",
    ),
    drawing(
        "Train.inner='zb-h1'",
        "Train.schedule='three-phase'",
        named="painter/Layout.lanes=4: Train.inner='zb-h1' has no place for lanes",
        legal="set it to 1, or Train.inner to '1f1b'",
    ),
    Wrong("Train.schedule=nested", "vision/Layout.lanes=1: Train.schedule='nested'", "set it to 2, llm/Layout.pp"),
    train(
        "Train.schedule=nested",
        "vision/Layout.lanes=2",
        named="vision/Layout.lanes=2: its ranks 4-11 are not the ranks 0-3 of the llm",
        legal="the same rank_offset, and lanes·dp·cp·tp = 4",
    ),
    Wrong("llm/Layout.copies=2", "llm/Layout.copies=2: a copy runs a whole module", "set pp to 1"),
    drawing("painter/Layout.copies=2", *APART, named="painter/Layout.copies=2: copies are of", legal="set it to 1"),
    Wrong("vision/Layout.copies=3", "vision/Layout.copies=3: every pipeline stage", "set it to 2, llm/Layout.pp"),
    train(
        "vision/Layout.copies=2",
        named="vision/Layout.copies=2: its ranks 4-11 are not the ranks 0-3 of the llm",
        legal="the same rank_offset, and copies·dp·cp·tp = 4",
    ),
    train(
        "vision/Layout.copies=2",
        "vision/Layout.dp=2",
        "vision/Layout.rank_offset=0",
        "Train.lowering=single",
        named="vision/Layout.copies=2: Train.lowering='single' has no copies",
        legal="set it to 1, or Train.lowering to 'auto'",
    ),
    train(
        "Train.schedule=nested",
        "llm/Layout.pp=1",
        named="Train.schedule='nested': has no pipeline to nest in",
        legal="set llm/Layout.pp above 1",
    ),
    Wrong("Train.window=-1", "Train.window=-1", "must be 0 or more"),
    Wrong("Train.dtype=float16", "Train.dtype='float16'", "'float32', 'bfloat16'"),
    Wrong("World.transport=devce_put", "World.transport='devce_put'", "did you mean 'device_put'?"),
    Wrong("World.warm_up=of", "World.warm_up='of'", "did you mean 'off'?"),
    Wrong("World.warm_up_seconds=0", "World.warm_up_seconds=0.0: must be above 0", "such as 120.0"),
    Wrong("World.platform=gpu", "World.platform='gpu'", "did you mean 'cuda'?"),
    Wrong("Optimizer.schedule=cosin", "vision/Optimizer.schedule='cosin'", "did you mean 'cosine'?"),
    Wrong("Train.sinks=('wandbb',)", "Train.sinks='wandbb'", "did you mean 'wandb'?"),
    Wrong("vision/ViT.positions=learned", "vision/ViT.positions='learned'", "did you mean 'learned2d'?"),
    Wrong("vision/ViT.activation=relu", "vision/ViT.activation='relu'", "legal: 'gelu', 'gelu_exact', 'quick_gelu'"),
    Wrong("Data.task=digit", "Data.task='digit'", "did you mean 'digits'?"),
    Wrong("llm/Decoder.preset=llama3_8b", "llm/Decoder.preset='llama3_8b'", "did you mean 'llama3-8b'?"),
    Wrong("vision/ViT.preset=clip", "vision/ViT.preset='clip'", "'clip-vit-l14'"),
    # types
    Wrong("Train.steps=many", "Train.steps=many: must be an integer", "such as 1000"),
    Wrong("Train.steps=1e3", "Train.steps=1000.0: must be an integer", "such as 1000"),
    Wrong("Train.clip_norm=False", "Train.clip_norm=False: must be a number", "such as 1.0"),
    Wrong("llm/Optimizer.frozen=1", "llm/Optimizer.frozen=1: must be True or False", "such as False"),
    Wrong("Train.sinks=wandb", "Train.sinks=wandb: must be a tuple", "such as ('wandb',)"),
    Wrong("Digits.images=(1, 2, 3)", "Digits.images=(1, 2, 3): must be a tuple of (an integer, an integer)", "such as"),
    Wrong("vision/Packing.buckets=(1, 2)", "vision/Packing.buckets=(1, 2): must be a tuple", "such as 2"),
    Wrong("Optimizer.learning_rate=nan", "Optimizer.learning_rate=nan: must be a number", "such as 0.001"),
    # negative, zero, out of range
    Wrong("Train.steps=0", "Train.steps=0: must be above 0", "such as 1"),
    Wrong("Train.seed=-1", "Train.seed=-1: must be 0 or more", "such as 0"),
    Wrong("Train.seed=4294967296", "Train.seed=4294967296: must be below 2**32", "such as 0"),
    Wrong("Train.clip_norm=-0.5", "Train.clip_norm=-0.5: must be 0 or more", "such as 0"),
    Wrong("Optimizer.learning_rate=0", "vision/Optimizer.learning_rate=0.0: must be above 0", "such as 1"),
    Wrong("Optimizer.b1=1.0", "vision/Optimizer.b1=1.0: must be at least 0 and below 1", "such as 0.9"),
    Wrong("Checkpoint.keep=0", "Checkpoint.keep=0: must be above 0", "such as 1"),
    Wrong("Checkpoint.every=-1", "Checkpoint.every=-1: must be 0 or more", "such as 0"),
    Wrong("Data.workers=-1", "Data.workers=-1: must be 0 or more", "such as 0"),
    Wrong("Digits.digits=(1, 7)", "Digits.digits=(1, 7): must ascend", "within 1 to 6"),
    Wrong("Digits.scale=(2.0, 1.0)", "Digits.scale=(2.0, 1.0): must ascend", "such as (0.8, 1.25)"),
    Wrong("vision/Layout.tp=0", "vision/Layout.tp=0: must be at least 1", "set it to 1"),
    Wrong("llm/Layout.rank_offset=-1", "llm/Layout.rank_offset=-1: must be at least 0", "set it to 0"),
    # between fields
    Wrong("Train.microbatches=5", "Train.microbatches=5: must divide Train.global_batch (32)", "such as 4"),
    Wrong("llm/Layout.tp=3", "llm/Layout.tp=3: must divide llm/Decoder.heads (4)", "use 4"),
    Wrong("vision/Layout.tp=8", "vision/Layout.tp=8: must divide vision/ViT.heads (4)", "use 4"),
    Wrong("vision/ViT.heads=3", "vision/ViT.heads=3: must divide ViT.width (64)", "such as 4"),
    Wrong("llm/Decoder.kv_heads=3", "llm/Decoder.kv_heads=3: must divide Decoder.heads (4)", "such as 4"),
    Wrong("llm/Layout.pp=9", "llm/Layout.pp=9: a stage needs a layer and there are 3", "use 3"),
    Wrong("llm/Layout.chunks=2", "llm/Layout.chunks=2: pp * chunks = 4 stages need a layer each", "use 1"),
    Wrong("vision/Layout.chunks=2", "vision/Layout.chunks=2: chunks interleave the stages of several", "set it to 1"),
    Wrong("llm/Layout.layers=(2, 2)", "llm/Layout.layers=(2, 2): sums to 4 and there are 3", "use (2, 1), or () for"),
    Wrong("llm/Layout.layers=(3,)", "llm/Layout.layers=(3,): must have a number for each of the", "use (2, 1)"),
    Wrong("llm/Layout.layers=(3, 0)", "llm/Layout.layers=(3, 0): a stage needs a layer", "use (2, 1)"),
    Wrong("llm/Layout.layers=3", "llm/Layout.layers=3: must be a tuple of items that are each an", "such as (3, 5)"),
    drawing("painter/Layout.layers=(2,)", named="painter/Layout.layers=(2,): sums to 2 and", legal="use (3,), or"),
    Wrong("llm/Layout.chunks=0", "llm/Layout.chunks=0: must be at least 1", "set it to 1"),
    Wrong(
        "vision/Layout.optimizer_instances=3", "vision/Layout.optimizer_instances=3: must divide", "Layout.dp (4), such"
    ),
    Wrong("vision/Offload.parameters=True", "vision/Offload.parameters=True: Train.schedule='1f1b'", "set it to False"),
    Wrong("llm/Offload.parameters=True", "llm/Offload.parameters=True: the llm's parameters are", "set it to False"),
    Wrong("llm/Packing.buckets=((1, 65),)", "llm/Packing.buckets: rows of 65 tokens", "use 64"),
    command(
        "train",
        f"--gin_file={CONFIG.with_name('digits_vlm_colocated.gin')}",
        "--gin.Data.reorder=best",
        "--gin.Packing.buckets=()",
        named="Data.reorder='best': in their one bucket all microbatches take the same time",
        legal="set vision/Packing.buckets=4 or this to 'none'",
    ),
    command(
        "train", GIVEN, "--gin.vision/Offload.parameters=True", "--gin.Train.schedule='three-phase'",
        named="vision/Offload.parameters=True: shares no rank with llm", legal="or vision/Layout.rank_offset to 0",
    ),
    Wrong(
        "vision/Offload.activations=True",
        "vision/Offload.activations=True: Train.schedule='1f1b' leaves no time",
        "set it to False, or the schedule to 'three-phase'",
    ),
    Wrong("llm/Offload.activations=True", "llm/Offload.activations=True: the llm's microbatches do", "set it to False"),
    drawing(
        "painter/Offload.activations=True",
        named="painter/Offload.activations=True: a generator's backward follows",
        legal="set it to False",
    ),
    command(
        "train", GIVEN, "--gin.vision/Offload.activations=True", "--gin.Train.schedule='three-phase'",
        named="vision/Offload.activations=True: shares no rank with llm", legal="or vision/Layout.rank_offset to 0",
    ),
    command(
        "train", f"--gin_file={CONFIG.with_name('digits_draw.gin')}", "--gin.vision/Offload.activations=True",
        "--gin.vision/Layout.lanes=1", "--gin.vision/Layout.dp=8",
        named="vision/Offload.activations=True: without lanes it runs beside the llm",
        legal="or vision/Layout.lanes to 4",
    ),
    Wrong("vision/Offload.optimizer=1", "vision/Offload.optimizer=1: must be True or False", "such as False"),
    command(
        "train", f"--gin_file={CONFIG}", "--gin.llm/Layout.cp=4", "--gin.llm/Layout.pp=1",
        "--gin.llm/Layout.cp_way=all-to-all", "--gin.vision/Layout.rank_offset=0",
        named="llm/Layout.cp_way='all-to-all': cp=4 does not divide the 2 query heads of a tp rank",
        legal="use 'gather' or 'ring'",
    ),
    Wrong("vision/Layout.rank_offset=1", "vision/Layout.rank_offset=1: its ranks 1-4 and llm's ranks 0-3", "use 0"),
    Wrong("Train.lowering=one", "Train.lowering='one'", "'auto', 'ops', 'single'"),
    Wrong("Train.lowering='single'", "vision/Layout.rank_offset=4: under Train.lowering='single'", "set it to 0"),
    command(
        "train", GIVEN, "--gin.vision/Layout.rank_offset=0", "--gin.Train.lowering='single'",
        "--gin.Train.debug_nans=True",
        named="Train.lowering='single': Train.debug_nans checks op by op", legal="set it to 'ops' or 'auto'",
    ),
    Wrong("World.devices=4", "World.devices=4: the layouts need 8 devices, not 4", "--gin.World.devices=8"),
    Wrong("World.devices=5", "World.devices=5: the layouts need 8", "digits_vlm_one_device.gin (needs 1)"),
    Wrong("Train.profile_steps=(3, 1)", "Train.profile_steps=(3, 1)", "such as (1, 3)"),
    Wrong("Train.profile_steps=(1,)", "Train.profile_steps=(1,)", "such as (10, 12)"),
    Wrong("Optimizer.frozen=True", "llm/Optimizer.frozen=True: every module is frozen", "set it to False"),
    Wrong("Optimizer.warmup=520", "vision/Optimizer.warmup=520: must be below Train.steps (520)", "such as 52"),
    Wrong("ViT.width=32", "--gin.ViT.width=32 changes nothing", "write --gin.vision/ViT.width=32"),
    Wrong("llm/Decoder.vocab=10", "llm/Decoder.vocab=10: the tokenizer has", "or to 0 for the tokenizer's"),
    # the data
    Wrong("Data.sequence_length=8", "Data.sequence_length=8 is too short", "set it to at least 64"),
    Wrong("vision/Packing.buckets=0", "vision/Packing.buckets=0: must be 1 to 64", "such as 4"),
    Wrong("vision/Packing.buckets='auto'", "vision/Packing.buckets='auto': must be a tuple", "or an integer"),
    Wrong("vision/Packing.buckets=((2, 10),)", "vision/Packing.buckets: rows of 10 patches must", "such as 12"),
    Wrong("Data.tokenizer={d}/none.json", "Data.tokenizer='{d}/none.json' does not exist", "or ''"),
    Wrong("Data.tokenizer={d}/text", "Data.tokenizer='{d}/text' is not a tokenizer.json", "not a tokenizer.json"),
    command("plan", "--problem={d}/none.json", named="--problem={d}/none.json", legal="give a JSON file"),
    command("plan", GIVEN, "--profile={d}/none.json", named="--profile={d}/none.json", legal="give a JSON file"),
    command("plan", GIVEN, "--profile={d}/one.jsonl", named="is no profile of this version", legal="mmjax.profile"),
    command("plan", GIVEN, "--devices=h10:4,l20:4", named="--devices=h10:4,l20:4: there is no", legal="'h100'"),
    command("profile", GIVEN, named="--out is missing", legal="--out=OUT"),
    command("profile", "--out={d}/p.json", named="--gin_file is missing", legal="such as --gin_file=digits_vlm"),
    command("profile", GIVEN, "--out={d}", named="--out={d}: is a directory", legal="{d}/profile.json"),
    command("plan", "--problem={d}/one.jsonl", named="question: no such field", legal="'devices'"),
    command("train", GIVEN, "--gin.Data.task=folder", named="Data.folder=''", legal="such as 'my_images'"),
    command(
        "train", GIVEN, "--gin.Data.task=folder", "--gin.Data.folder={d}",
        named="Data.folder='{d}' has no data.jsonl", legal="one line per sample into {d}/data.jsonl",
    ),
    command(
        "train", GIVEN, "--gin.Data.task=folder", "--gin.Data.folder={d}/images",
        named="{d}/images/data.jsonl:2: image 'b.png' does not exist", legal="put it at {d}/images/b.png",
    ),
    *(
        command("train", GIVEN, *(f"--gin.{b}" for b in (f"Data.sources={given}", *more)), named=named, legal=legal)
        for given, more, named, legal in SOURCES
    ),
    Wrong("a/Source.path=x", "a/Source.path='x': no dataset is named", "add Data.sources = {'a': 1.0}"),
    command(
        "train", GIVEN, "--gin.vision/ViT.positions=learned2d", "--gin.vision/ViT.grid=6",
        named="vision/ViT.grid=6: an image may be 8 patches long", legal="grid=8 or positions='rope2d'",
    ),
    # data servers
    Wrong("Data.servers=('cpu1:8815',)", "Data.servers='cpu1:8815': write grpc+tls://host:8815", "grpc://127.0.0.1:8815"),
    Wrong("Data.servers=grpc+tls://cpu1", "Data.servers='grpc+tls://cpu1'", "write grpc+tls://host:8815"),
    Wrong("Data.servers=grpc://cpu1:8815", "Data.servers='grpc://cpu1:8815': without TLS", "write grpc+tls://cpu1:8815"),
    Wrong("Data.servers=3", "Data.servers=3: must be a tuple", "such as ('grpc+tls://host:8815',)"),
    Wrong("Data.servers={d}/none", "Data.servers='{d}/none': cannot be read", "such as grpc+tls://host:8815"),
    Wrong("Data.servers={d}/text", "{d}/text:1='no gin': write grpc+tls://host:8815", "grpc://127.0.0.1:8815"),
    Wrong("Data.fallback=locl", "Data.fallback='locl'", "did you mean 'local'?"),
    Wrong("Data.patience=0", "Data.patience=0.0: must be above 0", "such as 60.0"),
    command(
        "train", GIVEN, "--gin.Data.servers=grpc://[::1]:1", "--gin.Data.token_file={d}/none",
        named="Data.token_file='{d}/none': cannot be read", legal="or '' for the environment's MMJAX_DATA_TOKEN",
    ),
    command(
        "train", GIVEN, "--gin.Data.servers=grpc://[::1]:1", "--gin.Data.token_file={d}/text",
        named="Data.token_file='{d}/text': others may read it", legal="chmod 600 {d}/text",
    ),
    command(
        "train", GIVEN, "--gin.Data.servers=grpc+tls://cpu1:1", "--gin.Data.tls_ca={d}/none",
        named="Data.tls_ca='{d}/none': cannot be read", legal="name the servers' authority (PEM)",
    ),
    command(
        "train", GIVEN, "--gin.Data.servers=grpc+tls://cpu1:1", "--gin.Data.tls_ca={d}/text",
        named="Data.tls_ca='{d}/text': holds no certificate", legal="name the servers' authority (PEM)",
    ),
    command(SERVE, named="--gin_file is missing", legal="such as --gin_file=digits_vlm"),
    command(SERVE, GIVEN, "--port=-1", named="--port=-1: must be 0 to 65535", legal="such as 8815"),
    command(SERVE, GIVEN, "--port=http", named="--port=http: must be an integer", legal="such as 8815"),
    command(SERVE, GIVEN, "--workers=-1", named="--workers=-1: must be 0 to 1024", legal="such as 0"),
    command(SERVE, GIVEN, "--worker=1", named="--worker=1: no flag", legal="did you mean '--workers'?"),
    command(SERVE, GIVEN, "--token=x", named="--token=x: no flag", legal="did you mean '--token_file'?"),
    command(
        SERVE, GIVEN, "--host=::",
        named="--host='::': can be reached", legal="add --token_file=FILE",
    ),
    command(SERVE, GIVEN, "--tls_cert={d}/text", named="--tls_cert='{d}/text': needs", legal="--tls_key"),
    command(SERVE, GIVEN, "--tls_key=x", named="--tls_key='x': needs the", legal="add --tls_cert=FILE"),
    command(
        SERVE, GIVEN, "--tls_key=x", "--tls_cert={d}/none",
        named="--tls_cert='{d}/none': cannot be read", legal="name the certificate (PEM)",
    ),
    command(
        SERVE, GIVEN, "--tls_key={d}/text", "--tls_cert={d}/text",
        named="--tls_cert='{d}/text': does not go with --tls_key='{d}/text'", legal="name a certificate (PEM)",
    ),
    command(
        SERVE, GIVEN, "--token_file={d}/none",
        named="--token_file='{d}/none': cannot be read", legal="name a file that holds the token alone",
    ),
    command(SERVE, GIVEN, "--gin.Digits.digits=(1, 7)", named="Digits.digits=(1, 7)", legal="1 to 6"),
    # files and flags
    command("train", "--gin_file={d}/digit.gin", named="--gin_file={d}/digit.gin: no such", legal="'{d}/digits.gin'?"),
    command("train", "--gin_file={d}", named="--gin_file={d}: that is a directory", legal="use '"),
    command("train", "--gin_file={d}/text", named="{d}/text:1: 'no gin' is no gin", legal="such as vision/Layout.tp ="),
    command(
        "train", "--gin_file={d}/inside/includes.gin",
        named="{d}/inside/includes.gin:1: include 'nowhere.gin': no such file",
        legal="one of mmjax's, such as digits_vlm",
    ),
    command("train", "--gin_file={d}/macro.gin", named="Train.steps=%STEPS: macro 'STEPS'", legal="STEPS = 1"),
    command("train", "--gin_fil=x", named="--gin_fil=x: no flag --gin_fil", legal="did you mean '--gin_file'?"),
    command("train", "--Train.steps=3", named="--Train.steps=3: no flag", legal="did you mean '--gin.Train.steps'?"),
    command("train", "configs/x.gin", named="'configs/x.gin' is no flag", legal="such as --gin_file=digits_vlm"),
    command("train", "--gin_file", named="--gin_file: a value is missing", legal="write --gin_file=VALUE"),
    command("train", named="--run_dir='': name a directory", legal="--gin_file=digits_vlm"),
    command("train", GIVEN, "--run_dir={d}/text/run", named="--run_dir='{d}/text/run': cannot", legal="'runs/run'"),
    command("train", GIVEN, "--run_dir={d}/text", named="--run_dir='{d}/text': cannot be made", legal="'runs/text'"),
    command("train", GIVEN, "--run_dir=/proc/self", named="--run_dir='/proc/self': cannot be", legal="name another"),
    command("train", GIVEN, "--json", named="--json: only a dry run has it", legal="add --dry_run"),
    command("train", GIVEN, "--dry_run=perhaps", named="--dry_run=perhaps: must be", legal="true or false"),
    # the other commands
    command("check", named="--gin_file is missing", legal="such as --gin_file=digits_vlm"),
    command("check", GIVEN, "--steps=0", named="--steps=0: must be 1 or more", legal="such as 3"),
    command("check", GIVEN, "--steps=few", named="--steps=few: must be an integer", legal="such as 3"),
    command("check", GIVEN, "--run_dir=x", named="--run_dir=x: no flag --run_dir", legal="'--steps'"),
    command("check", GIVEN, "--gin.Train.stepz=3", named="Train.stepz=3: Train has no field", legal="'steps'?"),
    command("eval", "--run_dir={d}/rum", named="--run_dir='{d}/rum' is no directory", legal="such as '{d}/fresh'"),
    command("eval", "--run_dir={d}/images", named="--run_dir='{d}/images' holds no", legal="such as '{d}/fresh'"),
    command("eval", "--run_dir={d}/fresh", named="'{d}/fresh' has no checkpoint yet", legal="{d}/fresh/config.gin"),
    command("eval", named="--run_dir is missing", legal="write --run_dir=RUN_DIR"),
    command("eval", "--run_dir={d}/fresh", "--samples=-1", named="--samples=-1: must be 0", legal="such as 180"),
    command("eval", "--run_dir={d}/fresh", "--samples=few", named="--samples=few: must be an", legal="such as 0"),
    command("eval", "--run_dir={d}/fresh", "--jsn", named="--jsn: no flag --jsn", legal="did you mean '--json'?"),
    command("eval", "--run_dir={d}/fresh", "--json=maybe", named="--json=maybe: must be", legal="true or false"),
    command(
        "eval", "--run_dir={d}/fresh", "--out={d}/text/x",
        named="--out='{d}/text/x': cannot be made (Not a directory)", legal="such as 'x'",
    ),
    command("generate", named="--messages is missing", legal="write --messages=MESSAGES"),
    command("generate", "--messages={d}/rum", named="--messages='{d}/rum': cannot be read", legal="name a file of"),
    command("generate", "--messages={d}/text", named="--messages='{d}/text': line 1 is not", legal="a list such as"),
    command("generate", ASKED, named="--run_dir and --weights are missing", legal="name one, the directory"),
    command("generate", ASKED, "--run_dir={d}/fresh", named="'{d}/fresh' has no checkpoint yet", legal="config.gin"),
    command("generate", ASKED, "--run_dir={d}/rum", named="--run_dir='{d}/rum' is no directory", legal="'{d}/fresh'"),
    command("generate", ASKED, "--weights={d}/rum", named="--weights='{d}/rum': ", legal="name a folder as save_"),
    *(
        command(name, *flags, named="a/Source.kind='spy:Reader': names code that", legal="{d}/coded/config.gin")
        for name, flags in {
            **dict.fromkeys(("check", "plan", "inspect", SERVE), (CODED,)),
            "profile": (CODED, "--out={d}/profile.json"),
            "eval": ("--run_dir={d}/coded",),
            "generate": ("--run_dir={d}/coded", ASKED),
        }.items()
    ),
    command(
        "train", GIVEN, "--gin.Data.sources={'a': 1.0}", "--gin.a/Source.kind='no_such:Reader'", "--allow_code",
        named="a/Source.kind='no_such:Reader'", legal="of a module that Python finds",
    ),
    *(
        command("train", given, f"--gin.llm/Callbacks.{field}={value}", "--allow_code", named=named, legal=legal)
        for given, field, value, named, legal in (
            (GIVEN, "after", "no.such:f", "llm/Callbacks.after='no.such:f'", "of a module that Python finds"),
            (GIVEN, "after", "math:mark", "llm/Callbacks.after='math:mark'", "math has no function or class 'mark'"),
            (GIVEN, "projected", "math:cos", "llm/Callbacks.projected='math:cos'", "use llm/Callbacks.after"),
        )
    ),
    command(
        "check", f"--gin_file={CONFIG.with_name('digits_draw.gin')}", "--gin.painter/Callbacks.after=math:cos",
        "--allow_code", named="painter/Callbacks.after='math:cos'", legal="compare losses with a run on one device",
    ),
    command("export", "--run_dir={d}", named="--out is missing", legal="write --out=OUT"),
    command("export", "--run_dir={d}", "--out={d}", named="--out='{d}' exists", legal="remove it or name another"),
    command("export", "--run_dir={d}", "--out={d}/o", named="--run_dir='{d}' has no", legal="as 'runs/digits_vlm'"),
    command("export", "--run_dir={d}", "--out={d}/o", "--step=-1", named="--step=-1: must be 0 or more", legal="0"),
    command("export", "--run_dir={d}", "--gin.Train.steps=3", named="--gin.Train.steps=3: no flag", legal="'--step'"),
    command("bench", "layout", named="benchmark 'layout'", legal="did you mean 'layouts'?"),
    command("bench", "layouts", "--rounds=0", named="--rounds=0: must be", legal="such as 15"),
    command("bench", "layouts", "--rounds=few", named="--rounds=few: must be an integer", legal="such as 15"),
]  # fmt: skip

# What the messages begin with that need the data or a checkpoint to be opened. All others come before JAX.
LATE = (
    "painter/Packing", "painter/Callbacks", "llm/Packing", "vision/Packing.buckets: ", "Data.reorder='best'",
    "llm/Decoder.vocab", "Data.sequence_length", "Data.tokenizer", "Data.folder", "{d}/images/data.jsonl",
    "Data.sources=", "Data.cache",
    "Source.path='s4", "a/Source.path=", "a/Source.size=", "a/Source.mean=", "a/Source.max_patches",
    "a/Source.held_out",
    "a/Source.kind='no_such", "vision/ViT.grid=6", "Data.servers='{d}", "{d}/text:1='no gin': write", "Data.token_file",
    "Data.tls_ca", "--run_dir='{d}/text", "--run_dir='/proc", "--run_dir='{d}' has no", "'{d}/fresh'",
)  # fmt: skip
HEAVY = ("jax", "flax", "optax", "orbax", "grain", "matplotlib", "scipy", "cvxpy", "pyarrow", "PIL", "rich",
         "tokenizers", "pandas")  # fmt: skip

# Runs every case in one process, so that the start of Python and JAX is paid once: those first that need no JAX.
RUNNER = """
import contextlib, importlib, io, json, sys, time
names = ("train", "check", "eval", "generate", "export", "bench", "plan", "profile", "inspect", "assembly.serve_flags")
def main_of(name):
    module = importlib.import_module(f"mmjax.{name}")
    return (importlib.import_module(f"mmjax.{name}.__main__") if hasattr(module, "__path__") else module).main
mains = {name: main_of(name) for name in names}
for name, argv, late in json.load(sys.stdin):
    if late: importlib.import_module("mmjax.train.trainer")  # its time is not the case's
    out, err, begin = io.StringIO(), io.StringIO(), time.monotonic()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = mains[name](argv)
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        status = repr(error)
    touched = "jax" in sys.modules and importlib.import_module("mmjax.jax_compat").backends_are_initialized()
    heavy = [name for name in sys.argv[1:] if name in sys.modules]
    row = [status, out.getvalue(), err.getvalue(), time.monotonic() - begin, touched, heavy]
    print(json.dumps(row), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    files = {
        "digits.gin": "",
        "text": "no gin",
        "inside/includes.gin": "include 'nowhere.gin'\n",
        "macro.gin": "Train.steps = %STEPS\n",
        "one.jsonl": '{"question": "x", "answer": "y"}',
        "images/data.jsonl": '{"images": [], "question": "x", "answer": "y"}\n'
        '{"images": ["b.png"], "question": "x", "answer": "y"}\n',
        "fresh/config.gin": f"include '{CONFIG}'\n",
        "coded/config.gin": f"include '{CONFIG}'\nData.sources = {{'a': 1.0}}\na/Source.kind = 'spy:Reader'\n",
        "ask.json": '[{"role": "user", "content": "Hello"}]',
        "spy.py": "print('imported')",  # where commands run: what imports it is seen on stdout
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[Any]:
    order = sorted(range(len(CASES)), key=lambda index: CASES[index].late)
    cases = [[CASES[index].command, CASES[index].argv(folder), CASES[index].late] for index in order]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *HEAVY], input=json.dumps(cases), capture_output=True, text=True, cwd=folder,
        timeout=240, env=ENVIRONMENT,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert (len(rows), done.stderr, done.returncode) == (len(CASES), "", 0)
    return [row for _, row in sorted(zip(order, rows, strict=True))]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{c.command} {c.binding or c.named}" for c in CASES])
def test_refused_in_one_line(index: int, outcomes: list[Any], folder: Path) -> None:
    case = CASES[index]
    status, out, err, seconds, touched, heavy = outcomes[index]
    assert (status, out.removeprefix(ANNOUNCED), touched) == (2, "", False), err
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert case.named.replace("{d}", str(folder)) in err, err
    assert case.legal.replace("{d}", str(folder)) in err, err
    assert seconds < SECONDS
    assert case.late or not heavy, "imported before it was refused"


def test_there_are_forty_and_none_twice() -> None:
    lines = [(case.command, *case.argv(Path("d"))) for case in CASES]
    assert len(set(lines)) == len(lines) >= 40
    assert sum(not case.late for case in CASES) > 0.8 * len(CASES)


@pytest.mark.parametrize("name", NAMES)
def test_help_comes_before_anything_heavy(name: str, folder: Path) -> None:
    """`-X importtime` would say what is imported; here each process says it itself."""
    program = (
        "import runpy, sys\n"
        f"sys.argv[1:] = ['--help']\n"
        f"try: runpy.run_module('mmjax.{name}', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "[]\n") and done.stdout.startswith("usage: "), done.stderr


@pytest.mark.parametrize(
    "case", [CASES[0], CASES[-4], next(c for c in CASES if c.binding.startswith("Data.seq"))], ids=lambda c: c.named
)
def test_a_cold_process_answers_in_time(case: Wrong, folder: Path) -> None:
    command = [sys.executable, "-m", f"mmjax.{case.command}", *case.argv(folder)]
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, timeout=120)
    seconds, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    worked = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    shown = done.stdout.removeprefix(ANNOUNCED)
    assert (done.returncode, shown, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert case.named.replace("{d}", str(folder)) in done.stderr
    assert min(seconds, worked) < (SECONDS if case.late else EARLY_SECONDS)
