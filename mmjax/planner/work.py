"""The work of each module for one row of its data: FLOPs, parameters, bytes. No device, no time.

A module is equal layers between two ends: a stem or embedding before the first layer, a projector, head or loss behind
the last. So a number of layers and the present ends describe a pipeline stage (`StagePart`), and three numbers describe
every quantity of a module (`Shares`). A row is padded to `width` positions, and all of them are computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.pipeline.state_bytes import STATES_ALONE, Sharded, StateBytes, state_bytes


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


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes that a stage needs on a device for its rows and its programs.

    Attributes:
      residuals: for each row, residuals from its forward to its backward.
      deferred: for each row, residuals from B to W if the backward is split.
      inputs: for each row, inputs that come from the host.
      temporary: for each row, temporaries of running programs.
      fixed: temporaries for any number of rows. A program needs the most of its first end, layers and last end.
      fixed_layer: further temporaries for each layer.
      split: share of all these temporaries that programs need if the backward is split.
    """

    residuals: Shares
    deferred: Shares = Shares()
    inputs: Shares = Shares()
    temporary: Shares = Shares()
    fixed: Shares = Shares()
    fixed_layer: float = 0.0
    split: float = 1.0

    def running(self, part: StagePart, rows: float) -> float:
        """Bytes of temporaries that the programs of a part need for `rows` rows, if the backward is not split."""
        sizes = zip(self.temporary.each, self.fixed.each, (part.first, True, part.last), strict=True)
        most = max(rows * row + fixed for row, fixed, present in sizes if present)
        return most + self.fixed_layer * part.layers


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
      together: positions that make one token for other modules; 0 if other modules always take whole rows.
      blended: number of its tokens whose mean is one position of another module.
      memory: by tp, the bytes that a device needs; for every tp that divides the module's sizes.
      after: names of the modules whose activations it takes.
      enters: layers of its targets, beside the first, that its activations enter.
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
    recompute: Shares = Shares()
    real: Real | None = None
    sums: tuple[int, int] = (2, 2)
    ring: float = 0.0
    attention: float = 0.0
    heads: tuple[int, int] = (1, 1)
    carried: float = 0.0
    output_bytes: float = 0.0
    together: int = 0
    blended: int = 1
    memory: Mapping[int, StageMemory] = field(default_factory=dict, hash=False)
    after: tuple[str, ...] = ()
    enters: tuple[int, ...] = ()

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

    @property
    def weight_gradients(self) -> Shares:
        """FLOPs of W if a row's backward is split: two for each trained weight and position.

        They are at most the forward's FLOPs: a weight that is only looked up or added is in no product. Behind the
        layers only the LLM's head is recomputed, and B computes its gradient.
        """
        most = (self.forward.first, self.forward.layer, self.forward.last - self.recompute.last)
        return Shares(
            *(min(2 * trained * self.width, limit) for trained, limit in zip(self.trained.each, most, strict=True))
        )

    def context(self, layout: Layout) -> int:
        """Number of cp ranks that share the positions of a row; 1 if each of them computes whole rows."""
        return layout.cp if self.ring else 1

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
    """

    modules: Mapping[str, ModuleWork] = field(hash=False)
    global_batch: int
    item: int = 2
    gradient: int = 4
    options: Mapping[str, Mapping[str, ModuleWork]] = field(default_factory=dict, hash=False)

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

    def states(
        self, name: str, part: StagePart, *, tp: int, shards: int, sharded: Sharded = STATES_ALONE
    ) -> StateBytes[float]:
        """Bytes of states of a part of module `name` on a device.

        shards: ranks that share its masters and moments. sharded: what else they share.
        """
        module = self.modules[name]
        return state_bytes(
            module.parameters.of(part) / tp,
            module.trained.of(part) / tp,
            item=self.item,
            gradient=self.gradient,
            shards=shards,
            frozen=module.frozen,
            sharded=sharded,
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
