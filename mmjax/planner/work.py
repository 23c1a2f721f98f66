"""The work of each module for one row of its data: FLOPs, parameters, bytes. No device, no time.

A module is equal layers between two ends: a stem or embedding before the first layer, a projector, head or loss behind
the last. So a number of layers and the present ends describe a pipeline stage (`StagePart`), and three numbers describe
every quantity of a module (`Shares`). A row is padded to `width` positions, and all of them are computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.models.experts.sizes import sent_share
from mmjax.pipeline.state_bytes import MASTER, MOMENTS, Sharded, StateBytes, state_bytes


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """The part of its module that a stage has.

    Attributes:
      layers: number of layers.
      first: whether it has the stem or embedding.
      last: whether it has the projector, or the head and the loss.
    """

    layers: int
    first: bool = False
    last: bool = False


@dataclass(frozen=True)
class Shares:
    """A quantity of a module in three numbers: before the first layer, in each layer, behind the last layer."""

    first: float = 0.0
    layer: float = 0.0
    last: float = 0.0

    def of(self, part: StagePart) -> float:
        """The quantity for a part: `layer` times its layers, with `first` and `last` if it has these ends."""
        return self.layer * part.layers + self.first * part.first + self.last * part.last

    @property
    def each(self) -> tuple[float, float, float]:
        """`first`, `layer` and `last`."""
        return self.first, self.layer, self.last

    def __add__(self, shares: Shares) -> Shares:
        return Shares(*(a + b for a, b in zip(self.each, shares.each, strict=True)))

    def times(self, factor: float) -> Shares:
        """The quantity, multiplied by `factor`."""
        return Shares(*(value * factor for value in self.each))

    def towards(self, shares: Shares, factor: float) -> Shares:
        """The quantity and `factor` times its difference to `shares`; no number of it is below 0."""
        return Shares(*(max(0.0, a + factor * (b - a)) for a, b in zip(self.each, shares.each, strict=True)))


@dataclass(frozen=True, kw_only=True)
class SplitMemory:
    """Bytes of a stage on a device if its backward is split, beside its `StageMemory`.

    Attributes:
      deferred: for each row, bytes from B to W.
      temporaries: temporaries of its programs over those of programs whose backward is not split.
    """

    deferred: Shares = Shares()
    temporaries: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes that a stage needs on a device for its rows and its programs.

    Attributes:
      residuals: for each row, residuals from its forward to its backward.
      inputs: for each row, inputs that come from the host.
      temporary: for each row, temporaries of running programs.
      fixed: temporaries for any number of rows. A program needs the most of its first end, layers and last end.
      fixed_layer: further temporaries for each layer.
      split: gives what a split backward needs; it may be traced when it is first read, since few plans read it.
    """

    residuals: Shares
    inputs: Shares = Shares()
    temporary: Shares = Shares()
    fixed: Shares = Shares()
    fixed_layer: float = 0.0
    split: Callable[[], SplitMemory] = field(default=SplitMemory, compare=False)

    def running(self, part: StagePart, rows: float) -> float:
        """Bytes of temporaries that the programs of a part need for `rows` rows, if the backward is not split."""
        sizes = zip(self.temporary.each, self.fixed.each, (part.first, True, part.last), strict=True)
        most = max(rows * row + fixed for row, fixed, present in sizes if present)
        return most + self.fixed_layer * part.layers

    def extrapolated(self, ep: int, memory: StageMemory, traced_ep: int, *, more_rows: float) -> StageMemory:
        """The bytes with degree ``ep`` of expert parallelism, if these are the bytes without it.

        Bytes for each row are linear in the rows of the experts' buffers. A part of the others, the experts' gradients,
        is divided by ep.

        Args:
          ep: the degree, 1 or more.
          memory: the bytes with another degree above 1.
          traced_ep: that degree.
          more_rows: rows of buffers beyond those without ep, over those that ``memory`` has beyond them.
        """
        parts = (1 - 1 / ep) / (1 - 1 / traced_ep)

        def split() -> SplitMemory:
            plain, other = self.split(), memory.split()
            return SplitMemory(
                deferred=plain.deferred.towards(other.deferred, more_rows),
                temporaries=other.temporaries if ep > 1 else plain.temporaries,
            )

        return StageMemory(
            residuals=self.residuals.towards(memory.residuals, more_rows),
            inputs=self.inputs,
            temporary=self.temporary.towards(memory.temporary, more_rows),
            fixed=self.fixed.towards(memory.fixed, parts),
            fixed_layer=max(0.0, self.fixed_layer + parts * (memory.fixed_layer - self.fixed_layer)),
            split=split,
        )


@dataclass(frozen=True, kw_only=True)
class ExpertWork:
    """The experts in a module's layers (`mmjax.models.experts`); figures of a layer are means over all layers.

    Attributes:
      count: experts of a layer that has them.
      per_token: experts that compute a token.
      parameters: number of parameters of a layer's experts, a part of `ModuleWork.parameters`.
      trained: number of those with gradients and optimizer states.
      forward: FLOPs of a row's forward in a layer's experts, a part of `ModuleWork.forward`.
      features: bytes of the features of a row's tokens, which ranks of ep exchange in a layer.
      hidden: bytes of the hidden units of all experts of a row's tokens, which backward reads.
      buffer: tokens and rows of an all-to-all's buffers over their mean numbers; 0 is the worst case.
      fullest: rows of the fullest rank of ep over their mean, declared; 1 means equal loads.
      traced_ep: the degree of `memory`, above 1.
      memory: by tp and way of the exchange, the bytes that a device needs with that degree.
      whole: by tp, the same for an all-to-all where ranks of tp have whole experts; a tp that they cannot have is not
        there.
    """

    count: int
    per_token: int
    parameters: float
    trained: float
    forward: float
    features: float
    hidden: float
    buffer: float = 0.0
    fullest: float = 1.0
    traced_ep: int = 2
    memory: Mapping[tuple[int, str], StageMemory] = field(default_factory=dict, hash=False)
    whole: Mapping[int, StageMemory] = field(default_factory=dict, hash=False)

    def buffer_rows(self, layout: Layout) -> float:
        """Rows of a rank's buffers over the rows that its tokens have without ep, as `mmjax.models.experts.exchange`.

        layout: the module's layout, whose ep divides `count`.
        """
        rows = min(self.per_token, self.count // layout.expert_ranks)
        if layout.ep_way == "all-to-all" and self.buffer:
            rows = min(rows, self.buffer * self.per_token / layout.expert_ranks)
        return layout.ep * rows / self.per_token

    def received_tokens(self, layout: Layout) -> float:
        """Tokens that a rank receives, and keeps a place for, over its own tokens, as `mmjax.models.experts.exchange`.

        layout: the module's layout, whose ep divides `count`.
        """
        if layout.ep_way == "ring" or not self.buffer:
            return layout.ep
        share = sent_share(self.count, self.per_token, self.count // layout.expert_ranks)
        return layout.ep * min(1.0, self.buffer * share)

    def uses(self, layout: Layout) -> int:
        """How often a layer's experts are used in a microbatch: in a ring, for each rank's tokens."""
        return layout.ep if layout.ep_way == "ring" else 1

    def stage_memory(self, plain: StageMemory, layout: Layout) -> StageMemory:
        """The bytes that a device needs in a layout.

        plain: the bytes with its tp and without ep.
        """
        if layout.ep == 1:
            return plain
        traced = replace(layout, dp=layout.dp * self.traced_ep, ep=self.traced_ep)  # a dp that this degree divides
        traced_bytes, more_bytes = (self._more_bytes(degrees) for degrees in (traced, layout))
        more_rows = more_bytes / traced_bytes if traced_bytes > 0 else 1.0
        memory = self.whole[layout.tp] if layout.expert_tp == 1 else self.memory[layout.tp, layout.ep_way]
        return plain.extrapolated(layout.ep, memory, self.traced_ep, more_rows=more_rows)

    def _more_bytes(self, layout: Layout) -> float:
        """Bytes of features and hidden units of a row's tokens that a layout adds to those without ep.

        Of hidden units a rank of tp has its part, or all of those of its own whole experts.
        """
        part = 1 / layout.tp
        rows = self.buffer_rows(layout) * (1 if layout.expert_tp == 1 else part)
        return self.features * (self.received_tokens(layout) - 1) + self.hidden * (rows - part)


@dataclass(frozen=True, kw_only=True)
class Real:
    """The part of an average sample that is not padding.

    Attributes:
      positions: real positions of a sample.
      flops: model FLOPs of these positions, without recompute, as `models.flops.training_flops` counts them.
    """

    positions: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class ModuleWork:
    """The work of a module and its projector.

    Attributes:
      name: the module's name.
      layers: number of layers.
      model_width: width of its activations.
      width: positions of a row.
      rows: rows of a sample; not whole where samples are packed.
      forward: FLOPs of a row's forward.
      backward: FLOPs of a row's backward, recompute included.
      parameters: number of all parameters.
      trained: number of parameters with gradients and optimizer states.
      frozen: bytes of each other parameter in storage; 0 means the bytes of the computation.
      averaged: whether trained parameters have running means.
      recompute: FLOPs of a row's recompute.
      real: the part of a sample that is not padding; None if a sample has no padding.
      sums: all-reduces of a layer's activations over a tp group in a forward and in a backward, for tp above 1, or
        gathers and scatters of the same bytes.
      ring: bytes of a row's keys and values in a layer, which cp ranks exchange if they share the row's positions; 0 if
        each cp rank computes all positions.
      attention: FLOPs of a row in a layer's attention, which hides the exchange.
      heads: query heads, and key/value heads.
      carried: bytes of a row's activation between two stages of the module.
      output_bytes: bytes of a row's activation from the module to other modules.
      longest: positions of its longest medium; 0 where ranks of cp cannot have whole media.
      together: positions that make one token for other modules; 0 if other modules always take whole rows.
      blended: number of its tokens whose mean is one position of another module.
      memory: by tp, the bytes that a device needs; for every tp that divides the module's sizes.
      after: names of the modules whose activations it takes.
      enters: layers of its targets, beside the first, that its activations enter.
      experts: the experts in its layers; None without.
    """

    name: str
    layers: int
    model_width: int
    width: int
    rows: float
    forward: Shares
    backward: Shares
    parameters: Shares
    trained: Shares
    frozen: int = 0
    averaged: bool = False
    recompute: Shares = Shares()
    real: Real | None = None
    sums: tuple[int, int] = (2, 2)
    ring: float = 0.0
    attention: float = 0.0
    heads: tuple[int, int] = (1, 1)
    carried: float = 0.0
    output_bytes: float = 0.0
    longest: int = 0
    together: int = 0
    blended: int = 1
    memory: Mapping[int, StageMemory] = field(default_factory=dict, hash=False)
    after: tuple[str, ...] = ()
    enters: tuple[int, ...] = ()
    experts: ExpertWork | None = None

    @property
    def whole(self) -> StagePart:
        """All layers and both ends of the module, as one part."""
        return StagePart(layers=self.layers, first=True, last=True)

    @property
    def computed(self) -> float:
        """FLOPs of a row, forward and backward."""
        return self.forward.of(self.whole) + self.backward.of(self.whole)

    @property
    def no_padding(self) -> Real:
        """The part of a sample that is not padding: `real`, or all of its rows if `real` is None."""
        if self.real:
            return self.real
        return Real(positions=self.rows * self.width, flops=self.rows * (self.computed - self.recompute.of(self.whole)))

    @cached_property
    def weight_gradients(self) -> Shares:
        """FLOPs of W if a row's backward is split: two for each trained weight and position.

        They are at most the forward's FLOPs: a weight that is only looked up or added is in no product. Behind the
        layers only the LLM's head is recomputed, and B computes its gradient. Those of experts are as many as their
        forward has.
        """
        if self.experts:
            experts = Shares(layer=self.experts.forward if self.experts.trained else 0.0)
            return self.dense.weight_gradients + experts
        most = (self.forward.first, self.forward.layer, self.forward.last - self.recompute.last)
        return Shares(
            *(min(2 * trained * self.width, limit) for trained, limit in zip(self.trained.each, most, strict=True))
        )

    @cached_property
    def dense(self) -> ModuleWork:
        """The module without its experts: their parameters and their FLOPs."""
        if self.experts is None:
            return self
        experts, again = self.experts, self.recompute.layer > 0
        passes = (2 if experts.trained else 1) * (self.backward.layer > 0) + again
        return replace(
            self,
            forward=self.forward + Shares(layer=-experts.forward),
            backward=self.backward + Shares(layer=-passes * experts.forward),
            recompute=self.recompute + Shares(layer=-again * experts.forward),
            parameters=self.parameters + Shares(layer=-experts.parameters),
            trained=self.trained + Shares(layer=-experts.trained),
            experts=None,
        )

    def with_flops(self, factor: float) -> ModuleWork:
        """The same module with `factor` times the FLOPs of layers and ends, such as 0.8 where rows have short pieces.

        The products of experts, which see no other token, stay the same.
        """
        return replace(
            self,
            forward=self.forward.times(factor),
            backward=self.backward.times(factor),
            recompute=self.recompute.times(factor),
        )

    def stage_memory(self, layout: Layout) -> StageMemory:
        """The bytes that a device needs in a layout, whose tp is one of those in `memory`."""
        plain = self.memory[layout.tp]
        return self.experts.stage_memory(plain, layout) if self.experts else plain

    def context(self, layout: Layout) -> int:
        """Number of cp ranks that share the positions of a row; 1 if each of them computes whole rows."""
        return layout.cp if self.ring else 1

    def has_whole_media(self, layout: Layout, width: int) -> bool:
        """Whether each of the cp ranks that share rows of `width` positions has whole media, and so all of its keys."""
        return layout.cp_tokens == "segments" and 0 < self.longest <= width // layout.cp

    @property
    def has_backward(self) -> bool:
        """Whether any part of the module has a backward."""
        return self.backward.of(self.whole) > 0

    def parts(self, layout: Layout) -> tuple[StagePart, ...]:
        """The part that each stage of a layout has, in order."""
        runs = layout.runs(self.layers)
        last = len(runs) - 1
        return tuple(StagePart(layers=len(run), first=at == 0, last=at == last) for at, run in enumerate(runs))


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a model on its data.

    Attributes:
      modules: work by module name, sources before users; one is "llm".
      global_batch: samples of a step.
      item: bytes of a number in computation, 2 or 4. With 4, masters that are not sharded are the compute parameters.
      gradient: bytes of a number in the sums of gradients.
      options: the work of each module whose `remat` a plan chooses, by module and value of `remat`, in ascending order
        of FLOPs: {"llm": {"dots": …, "full": …}}. `modules` has one of them, the first unless `with_remat` chose.
      joins_microbatches: whether an encoder may take several microbatches of a window together.
      overlap_grad_reduce: `Train.overlap_grad_reduce`; 'auto' stands for GPUs alone.
    """

    modules: Mapping[str, ModuleWork] = field(hash=False)
    global_batch: int
    item: int = 2
    gradient: int = 4
    options: Mapping[str, Mapping[str, ModuleWork]] = field(default_factory=dict, hash=False)
    joins_microbatches: bool = True
    overlap_grad_reduce: bool | str = False

    @property
    def fastest_remat(self) -> dict[str, str]:
        """The value of `remat` with the fewest FLOPs, of each module whose `remat` a plan chooses."""
        return {name: next(iter(options)) for name, options in self.options.items()}

    @property
    def remat_choices(self) -> list[dict[str, str]]:
        """Every combination of values of `remat`, by module, the first value of each module first; [{}] without any."""
        return [dict(zip(self.options, values, strict=True)) for values in itertools.product(*self.options.values())]

    def with_remat(self, remat: Mapping[str, str]) -> Work:
        """The work with these values of `remat`, by module; modules without `options` stay as they are."""
        chosen = {name: self.options[name][value] for name, value in remat.items() if name in self.options}
        if all(self.modules[name] is module for name, module in chosen.items()):
            return self
        return replace(self, modules={**self.modules, **chosen})

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of the modules whose activations the LLM takes, in the order of `modules`."""
        return tuple(name for name in self.modules if name in self.modules[LLM].after)

    @property
    def generators(self) -> tuple[str, ...]:
        """Names of the modules that take the LLM's activations, in the order of `modules`."""
        return tuple(name for name, module in self.modules.items() if LLM in module.after)

    def states(self, name: str, part: StagePart, layout: Layout) -> StateBytes[float]:
        """Bytes of states of a part of module `name` on a device of a layout."""
        dense, *experts = self.states_by_group(name, part, layout)
        return sum(experts, start=dense)

    def states_by_group(self, name: str, part: StagePart, layout: Layout) -> tuple[StateBytes[float], ...]:
        """`states`, those of experts separately if ranks of ep have different ones: then they come second."""
        return self._known_states(name, part, layout)

    @cached_property
    def _known_states(self) -> Callable[[str, StagePart, Layout], tuple[StateBytes[float], ...]]:
        """`states_by_group`, each counted once: a search asks for the same few layouts in many candidates."""
        return cache(self._count_states)

    def _count_states(self, name: str, part: StagePart, layout: Layout) -> tuple[StateBytes[float], ...]:
        module, dense = self.modules[name], self.modules[name].dense
        if layout.ep == 1 or module.experts is None:
            return (self._states(module.parameters.of(part), module.trained.of(part), module, layout),)
        parameters, trained = (
            part.layers * number / layout.ep for number in (module.experts.parameters, module.experts.trained)
        )
        return (
            self._states(dense.parameters.of(part), dense.trained.of(part), module, layout),
            self._states(parameters, trained, module, layout, apart=layout.ep),
        )

    def _states(
        self, parameters: float, trained: float, module: ModuleWork, layout: Layout, *, apart: int = 1
    ) -> StateBytes[float]:
        return state_bytes(
            parameters / layout.tp,
            trained / layout.tp,
            item=self.item,
            gradient=self.gradient,
            shards=layout.optimizer_shards,
            frozen=module.frozen,
            sharded=Sharded(sums=layout.scatters_gradients, parameters=layout.shards_parameters),
            apart=apart,
            moments=MOMENTS + (MASTER if module.averaged else 0),
        )

    def limited(self, tps: Callable[[str], Collection[int]]) -> Work:
        """The same work, in which module `name` may only have the tp in `tps(name)`."""

        def limit(name: str, module: ModuleWork) -> ModuleWork:
            return replace(module, memory={tp: memory for tp, memory in module.memory.items() if tp in tps(name)})

        options = {
            name: {value: limit(name, module) for value, module in by_value.items()}
            for name, by_value in self.options.items()
        }
        modules = {name: limit(name, module) for name, module in self.modules.items()}
        modules |= {name: options[name][value] for name, value in self.fastest_remat.items()}
        return replace(self, modules=modules, options=options)

    @property
    def flops(self) -> float:
        """Model FLOPs of a step, as a run's metrics count them: real positions only, without recompute."""
        return self.global_batch * sum(module.no_padding.flops for module in self.modules.values())

    @property
    def positions(self) -> float:
        """Positions of a step that are not padding, in all modules together."""
        return self.global_batch * sum(module.no_padding.positions for module in self.modules.values())
