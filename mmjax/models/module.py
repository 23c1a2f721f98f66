"""A module: an encoder, a language model or a generator. They differ in what they read and give, not in type.

A *medium* is an image, or a recording. It is cut into *patches* along its axes: squares of pixels, or pairs of log-mel
frames. A module with a medium has rows of patches, one without has rows of text. How modules are joined, and cut into
stages, is said in ``graph``.

A module of one's own is a subclass in a file of one's own, named in a configuration as "package.module:Class".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, Self

import numpy as np
from jaxtyping import Array, Float

from mmjax.attention.language import MaskKind, Rules
from mmjax.attention.mask import Mask
from mmjax.configurable import ConfigError, gin_name
from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context
from mmjax.models.layers import Params, run_cached, run_layer, scan_layers
from mmjax.models.parameters import Create, LayerRun, LogicalAxes, Part

Block = Callable[[Array, Params], Array]
"""One layer: its input, or several rows' of features, and its parameters, to its output."""
HostInputs = Mapping[str, np.ndarray]
Say = Callable[[Sequence[HostInputs]], Sequence[np.ndarray]]
"""Predictions of a module's last stage for such inputs, by microbatch."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss of a module: a sum over all tokens of a step, divided by a count that is known before the step.

    Attributes:
      weight: its weight in the sum that is optimised. A loss of weight 0 is a metric, reported and without a gradient.
      per: name of the count, one of ``StepBatch.counts`` such as "samples" or "llm_tokens". "" is the module's own: the
        loss weights of the text, the numbers that a generator draws, the patches that an encoder sees.
    """

    weight: float = 1.0
    per: str = ""

    def count(self, module: str) -> str:
        """Name of the count that this loss of a module is divided by."""
        return self.per or module


@dataclass(frozen=True)
class LayerGroup:
    """Equal layers, one after another. A module has one group or several, which a layout may cut anywhere.

    Attributes:
      layers: their number.
      create: creates one layer's parameters.
      block: ``(context, x) -> block``, the function of one layer. What all layers share is computed here, once a stage;
        ``x`` is the input of the first of them.
      window: how many tokens of its segment a token sees in these layers, itself included, the latest in order; 0 means
        all that the module's mask allows.
      grid_window: edge, in positions, of the windows that cut a segment along every axis: a token sees those of its own
        in these layers, such as patches in a square of an image; 0 means all that the mask allows.
      rules: which tokens see which in these layers; ``None`` means what the module's ``mask`` says.
    """

    layers: int
    create: Create
    block: Callable[[Context, Array], Block]
    window: int = 0
    grid_window: int = 0
    rules: Rules | None = None

    def mask(self, kind: MaskKind) -> Mask:
        """The mask of these layers in a module of this kind."""
        if self.rules:
            return Mask.of(self.rules, self.window, self.grid_window)
        return Mask(kind, self.window, self.grid_window)


@dataclass(frozen=True)
class Module(ABC):
    """A module with its settings. What it computes is on local shards inside ``shard_map`` (see ``layers``): features
    and ``Context.inputs`` are of one rank's tokens, which ``column_parallel`` brings together where ranks of tp share
    them.

    Parameters are nested dicts: those of ``parts`` by name. Every weight is used through ``layers.linear``,
    ``column_parallel``, ``row_parallel``, a norm or a lookup.

    Attributes:
      config: an instance of ``Config``. Its fields ``layers``, ``width`` and, of a module with a medium, ``merge`` have
        the same meaning in all modules.
      Config: the configurable class of its settings.
      mask: which tokens of a segment attend to which.
      in_order: whether neighbouring tokens meet outside of attention, as in a convolution: then they stay in their
        order on ranks of context parallelism.
      axes: names of the dimensions of its parameters, beyond ``parameters.LOGICAL_AXES``. tp splits "heads", "mlp" and
        "vocab".
    """

    config: Any

    Config: ClassVar[type[Any]]
    mask: ClassVar[MaskKind] = "full"
    in_order: ClassVar[bool] = False
    axes: ClassVar[LogicalAxes] = {}

    # ---- parameters --------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def groups(self) -> tuple[LayerGroup, ...]:
        """Its layers; the groups have ``config.layers`` of them together."""

    @abstractmethod
    def parts(self, first: bool, last: bool) -> tuple[Part, ...]:
        """Parameters outside of layers that the first and the last stage hold."""

    def axes_of(self, tp: int) -> LogicalAxes:
        """``axes`` where tp has this degree.

        A dimension `KV_HEADS` is of fewer heads than tp has ranks. It is whole on all of them, and each takes the head
        that its query heads read.
        """
        return self.axes

    # ---- computation -------------------------------------------------------------------------------------------------

    @abstractmethod
    def inputs(self, first: bool, last: bool) -> tuple[str, ...]:
        """Host inputs that a stage reads; "segments" is one of them."""

    @abstractmethod
    def embed(self, p: Params, context: Context) -> Float[Array, "B T D"]:
        """The first stage's host inputs as features; what other modules give comes on top."""

    def end(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Features behind the last layer and what follows it, such as a norm; the module gives these to others."""
        return x

    @property
    def losses(self) -> Mapping[str, Loss]:
        """Its losses and metrics by name; "loss" is what the name of a main loss should be."""
        return {}

    def loss(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Mapping[str, Float[Array, ""]]:
        """The sum of each of its ``losses``, from what ``end`` gives."""
        raise NotImplementedError(f"{type(self).__name__} gives no loss")

    def predict(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Any:
        """Takes the place of ``loss`` in evaluation: an array whose first dimension is rows, or ``None``."""
        return None

    def logits(self, p: Params, context: Context, x: Float[Array, "B 1 D"]) -> Float[Array, "B 1 V"]:
        """A language model's fp32 logits of the next token, from what ``end`` gives of each row's last.

        V is this rank's part of the vocabulary, as tp splits it; what pads it has -1e30. A module that generates text
        has these, a causal mask, and layers in which tokens meet in ``Context.attend`` alone.
        """
        raise NotImplementedError(f"{type(self).__name__}.logits: a module without it generates no text")

    def draw(self, given: Sequence[HostInputs], say: Say) -> list[np.ndarray]:
        """A generator's patches ``[R, T, E]`` of each microbatch, from inputs with noise as patches.

        ``say`` gives what ``predict`` gives for such inputs.
        """
        raise NotImplementedError(f"{type(self).__name__} draws nothing")

    # ---- what is known without devices -------------------------------------------------------------------------------

    @property
    def medium(self) -> EncoderSpec | None:
        """How its medium is cut into patches, for the data side; ``None`` for rows of text."""
        return None

    @property
    def sees(self) -> str:
        """The rules of its rows of text, as ``attention.language`` writes them: the data side makes words of them."""
        return "causal"

    @property
    def masks(self) -> tuple[tuple[int, Mask], ...]:
        """Its layers' masks: of each group, how many layers have it."""
        return tuple((group.layers, group.mask(self.mask)) for group in self.groups)

    @property
    def remembers(self) -> tuple[str, ...]:
        """The host inputs of each token that its masks read, but for order, which is a token's place."""
        reads = (name for _, mask in self.masks for name in mask.reads)
        return tuple(dict.fromkeys(name for name in reads if name != "order"))

    @property
    def position_axes(self) -> int:
        """Numbers of a position in its rows of text: 1, a token's place in its sample, or 3 (see ``data.mrope``)."""
        return 1

    @abstractmethod
    def parameters(self) -> int:
        """Number of its parameters, without padding; a tied table counts once."""

    @abstractmethod
    def forward_flops(self, lengths: Iterable[int]) -> int:
        """Model FLOPs of a forward over segments of so many tokens or patches each (rules: ``flops``)."""

    def counted_flops(self, lengths: Iterable[int], pairs: Mapping[Mask, int]) -> int:
        """The same, where the pairs that each of ``masks`` allows in these segments have been counted."""
        return self.forward_flops(lengths)

    def with_vocab(self, vocab: int) -> Self:
        """The module with the tokenizer's vocabulary, where its settings leave it open."""
        is_open = getattr(self.config, "vocab", vocab) == 0
        return replace(self, config=replace(self.config, vocab=vocab)) if is_open else self

    @property
    def patches_per_token(self) -> int:
        """Patches that one LLM token stands for; 1 for text."""
        return self.medium.patches_per_token if self.medium else 1

    @property
    def merged_width(self) -> int:
        """Width of the features of these patches, side by side."""
        return self.config.width * self.patches_per_token


def layer_runs(module: Module, layers: range, *, unroll: bool = False) -> tuple[tuple[LayerRun, LayerGroup], ...]:
    """The part of each of a module's layer groups that lies among ``layers``, or layer by layer where ``unroll``."""
    groups, start, found = module.groups, 0, []
    for number, group in enumerate(groups):
        own = range(max(start, layers.start), min(start + group.layers, layers.stop))
        name = "layers" if len(groups) == 1 else f"layers_{number}"
        if unroll:
            found += [(LayerRun(group.create, range(i, i + 1), f"layer_{i:03d}", stacked=False), group) for i in own]
        elif own:
            found.append((LayerRun(group.create, own, name), group))
        start += group.layers
    if start != module.config.layers:
        name = f"{gin_name(type(module.config))}.layers"
        raise ConfigError(f"{type(module).__name__}.groups have {start} layers and {name} is {module.config.layers}")
    return tuple(found)


def run_layers(
    module: Module,
    p: Params,
    context: Context,
    x: Float[Array, "B T D"],
    layers: range | None = None,
    added: Mapping[int, Array] | None = None,
    *,
    unroll: bool = False,
    keep: Iterable[int] = (),
) -> tuple[Float[Array, "B T D"], dict[int, Float[Array, "B T D"]]]:
    """Runs some of a module's layers, all by default.

    Args:
      module: the module.
      p: its parameters in a stage that holds these layers.
      context: the surroundings of the stage.
      x: input of the first layer.
      layers: the layers, numbered in the module.
      added: what is added to the inputs of layers, of the shape of ``x``, by the layer's number in the module.
      unroll: whether ``p`` holds every layer by itself, and layers are run without a loop.
      keep: layers whose outputs are given too, numbered in the module; none where there is a cache.

    Returns:
      The last output, and those of ``keep`` that were run.
    """
    remat = getattr(module.config, "remat", "none")
    runs = layer_runs(module, range(module.config.layers) if layers is None else layers, unroll=unroll)
    kept: dict[int, Array] = {}
    for group, own in groupby(runs, key=itemgetter(1)):
        block = group.block(context.under(group.mask(module.mask)), x)
        for run, _ in own:
            start, run_all = run.layers.start, scan_layers if run.stacked else run_layer
            here = {layer - start: value for layer, value in (added or {}).items() if layer in run.layers}
            wanted = [layer - start for layer in keep if layer in run.layers]
            if context.cache:
                x = run_cached(context.cache, run.name, block, x, p[run.name], here, stacked=run.stacked)
                continue
            x, found = run_all(block, x, p[run.name], remat, here, wanted)
            kept |= {start + layer: value for layer, value in found.items()}
    return x, kept
