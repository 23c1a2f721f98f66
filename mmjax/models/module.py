"""The interface of modules. Encoders, language models and generators have the same base class.

A *medium* is an image or a recording. It is cut into *patches* along its axes: squares of pixels, or pairs of log-mel
frames. A module with a medium has rows of patches; a module without has rows of text. ``graph`` connects modules and
cuts them into stages.

A user's module is a subclass in the user's file, named in a configuration as "package.module:Class".
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.attention.language import MaskKind, Rules
from mmjax.attention.mask import Mask
from mmjax.configurable import ConfigError, gin_name
from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context, SharedKeys
from mmjax.models.guidance import Guidance
from mmjax.models.handles import fetched_after, scattered_before
from mmjax.models.layers import LAYER_INPUT, Body, Params, Sums, run_cached, run_layer, scan_layers
from mmjax.models.parameters import Create, LayerRun, Part, declarations
from mmjax.models.samplers import HostInputs as HostInputs
from mmjax.models.samplers import Predict as Predict
from mmjax.models.traced_flops import traced_work

Block = Callable[[Array, Params], Array | tuple[Array, Sums]]
"""One layer: its input, or several rows' of features, and its parameters, to its output. A layer with losses gives the
output and the sum of each of ``Module.layer_losses`` over the local tokens, by name.
"""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss of a module: a sum over all tokens of a step, divided by a count that is known before the step.

    Attributes:
      weight: the weight in the optimised sum. A loss of weight 0 is a metric: it is reported and has no gradient.
      per: the name of the count, one of ``StepBatch.counts`` such as "samples" or "llm_tokens". "" stands for the count
        of the module: the sum of loss weights of the text, the values that a generator predicts, or an encoder's
        patches.
    """

    weight: float = 1.0
    per: str = ""

    def count(self, module: str) -> str:
        """The name of the count that this loss of ``module`` is divided by: ``per``, or the module's name."""
        return self.per or module


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive equal layers. A module has one group or several, which a layout may cut anywhere.

    Attributes:
      layers: the number of layers.
      create: creates the parameters of one layer.
      block: ``(context, x) -> block``, makes the function of one layer. Values that all layers share are computed here,
        once a stage; ``x`` is the input of the first layer.
      window: the width of the sliding window over earlier tokens, the token itself included; 0 means no limit.
      grid_window: edge, in positions, of the windows that cut a segment along every axis, such as squares of an image.
        A token sees only its own window; 0 means no windows.
      rules: the mask rules of these layers; ``None`` stands for the module's ``mask``.
      stores: a name for the keys and values of its only layer, if later groups read them.
      reads: the name of stored keys and values, which its layers read in the same stage; "" for keys of their own.
      checkpoints: whether its block applies the module's checkpoint policy to parts of a layer, by itself.
    """

    layers: int
    create: Create
    block: Callable[[Context, Array], Block]
    window: int = 0
    grid_window: int = 0
    rules: Rules | None = None
    stores: str = ""
    reads: str = ""
    checkpoints: bool = False

    def mask(self, kind: MaskKind) -> Mask:
        """The mask of these layers: by ``rules`` if they are set, else of ``kind``, the kind of the module's mask."""
        if self.rules:
            return Mask.of(self.rules, self.window, self.grid_window)
        return Mask(kind, self.window, self.grid_window)


@dataclass(frozen=True)
class Module(ABC):
    """A module with its settings.

    Its methods compute on local shards inside ``shard_map`` (see ``layers``). Features and ``Context.inputs`` are of
    one rank's tokens; under sequence parallelism ``column_parallel`` gathers the tokens of all tp ranks.

    Parameters are nested dicts, with the arrays of ``parts`` by name. Each is created with the names of its dimensions,
    such as ``nnx.Param(value, dims=("embed", "mlp"))``; tp splits "heads", "kv_heads", "mlp" and "vocab" (see
    ``parameters.Declaration``). Every weight is used in ``layers.linear``, ``column_parallel``, ``row_parallel``, a
    norm or a lookup.

    Attributes:
      config: an instance of ``Config``. Its fields ``layers``, ``width`` and, with a medium, ``merge`` have the same
        meaning in all modules.
      Config: the configurable class of its settings.
      mask: the kind of its attention mask.
    """

    config: Any

    Config: ClassVar[type[Any]]
    mask: ClassVar[MaskKind] = "full"

    # ---- parameters --------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def groups(self) -> tuple[LayerGroup, ...]:
        """Its groups of layers in order, ``config.layers`` layers in total."""

    @abstractmethod
    def parts(self, *, first: bool, last: bool) -> tuple[Part, ...]:
        """The parameters outside of layers of a stage that is the module's ``first``, its ``last``, or both; () for
        neither.
        """

    # ---- computation -------------------------------------------------------------------------------------------------

    @abstractmethod
    def inputs(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """Names of the host inputs that a stage reads; "segments" is always one of them.

        ``first`` and ``last`` are whether the stage is the module's first and its last.
        """

    @abstractmethod
    def embed(self, p: Params, context: Context) -> Float[Array, "B T D"]:
        """Features of the first stage's host inputs, ``context.inputs``; tokens of other modules are merged into them
        later.

        ``p`` are the module's parameters on this stage, as in all methods.
        """

    def end(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The computation behind the last layer, such as a norm, by default none; other modules get its result.

        ``p`` are the module's parameters on its last stage, and ``x`` is the output of the last layer.
        """
        return x

    @property
    def layer_input_width(self) -> int:
        """The width of the features that each layer reads beside its input, as its parameter ``LAYER_INPUT``; 0 for
        none. Such a module has one stage.
        """
        return 0

    @property
    def media_token(self) -> int:
        """The token that ``layer_inputs`` finds in the places of media, in the context's host input "tokens"."""
        return -1

    def layer_inputs(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Float[Array, "L B T P"]:
        """The features that each layer reads beside its input, if any, from the input of the first one, ``x``.

        ``p`` are the module's parameters. Host inputs "tokens" are ``media_token`` where ``x`` has tokens of others.
        """
        raise NotImplementedError(f"{type(self).__name__} has no inputs of layers")

    @property
    def losses(self) -> Mapping[str, Loss]:
        """Its losses and metrics by name; a main loss should have the name "loss". {} for a module without losses."""
        return {}

    @property
    def layer_losses(self) -> Mapping[str, Loss]:
        """Losses and metrics that its layers give, by name, beside ``losses``; {} for layers without losses."""
        return {}

    def loss(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Mapping[str, Float[Array, ""]]:
        """The sum of each of its ``losses`` over the local tokens, by name.

        ``p`` are the module's parameters on its last stage, and ``x`` is the result of ``end``.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no loss")

    def predict(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Any:
        """Replaces ``loss`` in evaluation: an array whose first dimension is this rank's rows, or ``None`` for no
        predictions.

        ``p`` are the module's parameters on its last stage, and ``x`` is the result of ``end``.
        """
        return None

    def logits(self, p: Params, context: Context, x: Float[Array, "B 1 D"]) -> Float[Array, "B 1 V"]:
        """A language model's fp32 logits of the next token, from the result of ``end`` for each row's last token,
        ``x``.

        ``p`` are the module's parameters on its last stage. V is this tp rank's part of the vocabulary; padding entries
        are -1e30. A module that generates text needs this method, a causal mask, and layers in which tokens interact in
        ``Context.attend`` alone.
        """
        raise NotImplementedError(f"{type(self).__name__}.logits: a module without it generates no text")

    @property
    def gives_logits(self) -> bool:
        """Whether it has the method ``logits``, with which text is generated."""
        return type(self).logits is not Module.logits

    def draw(self, inputs: Sequence[HostInputs], predict: Predict) -> list[np.ndarray]:
        """A generator's patches ``[R, T, E]`` of each microbatch, without noise.

        Args:
          inputs: the host inputs of each microbatch by name, with noise as "patches" ``[R, T, E]``.
          predict: computes the results of the method ``predict`` for such inputs.
        """
        raise NotImplementedError(f"{type(self).__name__} draws nothing")

    @property
    def guidance(self) -> Guidance:
        """The combination of a generator's predictions with and without the LLM's tokens.

        By default it is the prediction with them.
        """
        return Guidance()

    # ---- properties without devices ----------------------------------------------------------------------------------

    @property
    def medium(self) -> EncoderSpec | None:
        """The cutting of its medium into patches, for the data side; ``None`` for rows of text."""
        return None

    @property
    def in_order(self) -> bool:
        """Whether tokens interact with their neighbours outside of attention, as in a convolution. Then context
        parallelism keeps tokens in order.
        """
        return False

    @property
    def sees(self) -> str:
        """The mask rules of its rows of text (see ``attention.language``), which the data side turns into words."""
        return "causal"

    @property
    def masks(self) -> tuple[tuple[int, Mask], ...]:
        """Number of layers and mask of each layer group, in order."""
        return tuple((group.layers, group.mask(self.mask)) for group in self.groups)

    @property
    def remembers(self) -> tuple[str, ...]:
        """Names of the host inputs that its masks read of earlier tokens, except "order", which is the place in the
        cache.
        """
        names = (name for _, mask in self.masks for name in mask.input_names)
        return tuple(dict.fromkeys(name for name in names if name != "order"))

    @property
    def position_axes(self) -> int:
        """The number of axes of positions in rows of text: 1, the place in the sample, or 3 (see ``data.mrope``)."""
        return 1

    def parameters(self) -> int:
        """The number of its parameters, without padding; a tied table counts once.

        Raises:
          ValueError: the vocabulary size is not set yet.
        """
        if getattr(self.config, "vocab", None) == 0:
            name = f"{gin_name(type(self.config))}.vocab"
            raise ValueError(f"{name}: 0 is no size; set it to the tokenizer's vocabulary first")
        single = (leaf for part in self.parts(first=True, last=True) for leaf in part.declarations.values())
        layers = ((group.layers, declarations(group.create).values()) for group in self.groups)
        in_layers = sum(count * sum(math.prod(leaf.shape) for leaf in leaves) for count, leaves in layers)
        return in_layers + sum(math.prod(leaf.shape) for leaf in single)

    def forward_flops(self, lengths: Iterable[int]) -> int:
        """Model FLOPs of a forward over segments of these lengths in tokens or patches, in total (rules: ``flops``).

        By default products and attention of a traced row are counted (see ``traced_flops``).
        """
        return traced_work(self).flops(lengths)

    def counted_flops(self, lengths: Iterable[int], pairs: Mapping[Mask, int]) -> int:
        """``forward_flops`` with counted pairs: ``pairs`` has the number that each of ``masks`` allows in these
        segments, in one layer.
        """
        return traced_work(self).flops(lengths, pairs)

    def positions_of(self, weight: str, length: int) -> int:
        """The number of positions of a segment that the product with a layer's weight, such as "attn/q", reads.

        ``length`` is the segment's, without special positions. By default all positions are read.
        """
        del weight
        return length + (self.medium.special if self.medium else 0)

    def routed_share(self, ranks: int, *, all_to_all: bool) -> float:
        """The share of the rows of a rank's grouped products that hold a token's choice, under equal loads; 1 without
        experts.

        Args:
          ranks: number of ranks with different experts.
          all_to_all: whether they exchange tokens by all-to-all; else in a ring.
        """
        del ranks, all_to_all
        return 1.0

    def with_vocab(self, vocab: int) -> Self:
        """A copy with the tokenizer's vocabulary size, where the field ``vocab`` of the settings is 0; else the module
        itself.
        """
        is_open = getattr(self.config, "vocab", vocab) == 0
        return replace(self, config=replace(self.config, vocab=vocab)) if is_open else self

    @property
    def patches_per_token(self) -> int:
        """The number of patches of one LLM token; 1 for text."""
        return self.medium.patches_per_token if self.medium else 1

    @property
    def merged_width(self) -> int:
        """The width of a token's concatenated patch features."""
        return self.config.width * self.patches_per_token


def layer_runs(module: Module, layers: range, *, unroll: bool = False) -> tuple[tuple[LayerRun, LayerGroup], ...]:
    """The runs of a module's ``layers``, each with its layer group, in order; with ``unroll`` every layer is a run.

    ``layers`` are indices in the module, from 0. A ``LayerRun`` has ``create``, ``layers``, a range, ``name`` and
    ``stacked``, a ``LayerGroup`` the layers' ``block`` and mask. A run's name is "layers", "layers_<group>" if there
    are several groups, or "layer_<index>" with ``unroll``, such as "layer_003".

    Raises:
      ConfigError: the module's groups do not have ``config.layers`` layers in total.
    """
    groups, start, runs = module.groups, 0, []
    for number, group in enumerate(groups):
        group_layers = range(max(start, layers.start), min(start + group.layers, layers.stop))
        name = "layers" if len(groups) == 1 else f"layers_{number}"
        if unroll:
            for i in group_layers:
                runs.append((LayerRun(group.create, range(i, i + 1), f"layer_{i:03d}", stacked=False), group))
        elif group_layers:
            runs.append((LayerRun(group.create, group_layers, name), group))
        start += group.layers
    if start != module.config.layers:
        name = f"{gin_name(type(module.config))}.layers"
        raise ConfigError(f"{type(module).__name__}.groups have {start} layers and {name} is {module.config.layers}")
    return tuple(runs)


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
) -> tuple[Float[Array, "B T D"], dict[int, Float[Array, "B T D"]], Sums]:
    """Runs some of a module's layers, inside ``shard_map``.

    Args:
      module: the module, such as ``module_of(DecoderConfig())``.
      p: the module's parameters in a stage with these layers, by the names of ``layer_runs``, such as {"layers": …}.
      context: the context of the stage, such as ``Context.of(Axes(), {"segments": …, "positions": …}, "causal")``.
      x: the input of the first layer.
      layers: indices of the layers in the module, from 0; all by default.
      added: values of the shape of ``x`` that are added to the inputs of layers, by the layer's index in the module.
      unroll: whether every layer has separate parameters and layers run without a loop.
      keep: indices in the module of the layers whose outputs are returned too; none with a cache.

    Returns:
      The last output, the outputs of those ``keep`` that are among ``layers``, by index in the module, and the sums of
      the module's ``layer_losses``, by name; without them, and with a cache, {}.
    """
    remat = getattr(module.config, "remat", "none")
    runs = layer_runs(module, range(module.config.layers) if layers is None else layers, unroll=unroll)
    kept_outputs: dict[int, Array] = {}
    totals: dict[str, Array] = {}
    before: Array | None = None  # the input of the layer before
    shared: dict[str, SharedKeys] = {}
    of_layers = _split(module.layer_inputs(p, context, x), [run for run, _ in runs]) if module.layer_input_width else {}
    names = [run.name for run, _ in runs]
    following, p = dict(pairwise(names)), dict(p)
    for group, group_runs in groupby(runs, key=itemgetter(1)):
        stored = list[SharedKeys]() if group.stores else None
        surroundings = replace(context.under(group.mask(module.mask)), stored=stored, shared=shared.get(group.reads))
        body = _with_sums(group.block(surroundings, x), stored)
        for run, _ in group_runs:
            start, run_all = run.layers.start, scan_layers if run.stacked else run_layer
            local_added = {layer - start: value for layer, value in (added or {}).items() if layer in run.layers}
            local_keep = [layer - start for layer in keep if layer in run.layers]
            if context.cache:
                params = {**p[run.name], **of_layers.get(run.name, {})}
                x = run_cached(context.cache, run.name, body, x, params, local_added, stacked=run.stacked)
                if group.stores:
                    shared[group.stores] = SharedKeys(*context.cache.of_layer(run.name))
                continue
            if next_run := following.get(run.name):
                x, p[next_run] = scattered_before(x, p[next_run])
            params, before = p[run.name] if before is None else fetched_after(p[run.name], before), x
            params = {**params, **of_layers.get(run.name, {})}
            policy = "none" if group.checkpoints else remat
            x, local_kept, sums = run_all(body, x, params, policy, local_added, local_keep)
            if group.stores:
                shared[group.stores] = SharedKeys(sums[_STORED[0]], sums[_STORED[1]])
                sums = {name: total for name, total in sums.items() if name not in _STORED}
            kept_outputs |= {start + layer: value for layer, value in local_kept.items()}
            totals |= {name: totals[name] + total if name in totals else total for name, total in sums.items()}
    return x, kept_outputs, totals


def _split(x_LBTP: Array, runs: Sequence[LayerRun]) -> dict[str, dict[str, Array]]:
    """The inputs of layers as a parameter of each run, by the run's name."""
    ends = np.cumsum([len(run.layers) for run in runs])[:-1]
    parts = zip(runs, jnp.split(x_LBTP, ends), strict=True)
    return {run.name: {LAYER_INPUT: part if run.stacked else part[0]} for run, part in parts}


_STORED = ("stored keys", "stored values")
"""The names of keys and values that a layer gives to later ones, beside those of its losses."""


def _with_sums(block: Block, stored: list[SharedKeys] | None) -> Body:
    """The function of a layer as ``layers`` runs it, with the keys and values of ``stored`` among its results."""

    def body(x: Array, p: Params) -> tuple[Array, Sums]:
        result = block(x, p)
        y, sums = result if isinstance(result, tuple) else (result, {})
        if stored is None:
            return y, sums
        keys = stored.pop()
        return y, {**sums, _STORED[0]: keys.k, _STORED[1]: keys.v}

    return body
