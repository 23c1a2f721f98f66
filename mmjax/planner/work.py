"""What each module of a model has to do for one row of its data: FLOPs, parameters, bytes. No device, no time.

A module is equal layers between two ends: a stem or embedding before the first, a projector, head or loss behind the
last. So a pipeline stage is described by how many layers it has and which ends (`Part`), and every quantity of a module
by three numbers (`Shares`). A row is what its data are padded to: `width` positions, all of them computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from mmjax.mesh.layout import Layout
from mmjax.planner.problem import LLM


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a stage has of its module.

    Attributes:
      layers: how many. first: the stem or embedding. last: the projector, or the head and the loss.
    """

    layers: int
    first: bool = False
    last: bool = False


@dataclass(frozen=True)
class Shares:
    """A quantity of a module by where it arises: before the first layer, in each layer, behind the last."""

    first: float = 0.0
    layer: float = 0.0
    last: float = 0.0

    def of(self, part: Part) -> float:
        """The quantity of a part."""
        return self.layer * part.layers + self.first * part.first + self.last * part.last

    @property
    def each(self) -> tuple[float, float, float]:
        """The three in order."""
        return self.first, self.layer, self.last

    def towards(self, other: Shares, share: float) -> Shares:
        """So far on the straight line from here to another."""
        pairs = zip(self.each, other.each, strict=True)
        return Shares(*(mine * (1 - share) + theirs * share for mine, theirs in pairs))


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of a device that a stage's rows need.

    Attributes:
      kept: of a row, from its forward to its backward. deferred: of a row, from B to W where a backward is split.
      inputs: of a row, what the host gives.
      temporary, fixed: what programs need while they run, for a row and in any case; a program needs as much as the
        neediest of what it has.
      fixed_layer: what they need for each layer beside that.
      split: the share of all this that programs need where a backward is split.
    """

    kept: Shares
    deferred: Shares = Shares()
    inputs: Shares = Shares()
    temporary: Shares = Shares()
    fixed: Shares = Shares()
    fixed_layer: float = 0.0
    split: float = 1.0

    def running(self, part: Part, rows: float) -> float:
        """What the programs of a part need while they run."""
        pairs = zip(self.temporary.each, self.fixed.each, (part.first, True, part.last), strict=True)
        most = max(rows * more + fixed for more, fixed, there in pairs if there)
        return most + self.fixed_layer * part.layers

    def towards(self, other: Held, share: float) -> Held:
        """So far on the straight line from here to another."""
        return Held(
            kept=self.kept.towards(other.kept, share),
            deferred=self.deferred.towards(other.deferred, share),
            inputs=self.inputs.towards(other.inputs, share),
            temporary=self.temporary.towards(other.temporary, share),
            fixed=self.fixed.towards(other.fixed, share),
            fixed_layer=self.fixed_layer * (1 - share) + other.fixed_layer * share,
            split=self.split * (1 - share) + other.split * share,
        )


@dataclass(frozen=True, kw_only=True)
class Real:
    """What of a sample is no padding, on average.

    Attributes:
      positions: of it.
      flops: model FLOPs of these, as `models.flops.training_flops` counts them: without recompute.
    """

    positions: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class ModuleWork:
    """What a module has to do.

    Attributes:
      name: of the module. An encoder's work includes its projector's, a generator's too.
      layers: how many.
      model_width: of its activations.
      width: positions of a row.
      rows: of a sample; not whole where samples are packed.
      forward, backward: FLOPs of a row; a backward's include recompute. recompute: these alone.
      real: what of a sample is no padding; None where nothing is.
      parameters: all of them. trained: those that have gradients and optimizer states.
      sums: all-reduces of a layer's activations in a forward, and in a backward, over a tp group. None where tp is 1.
      ring: bytes of a row's keys and values in a layer, which go round where cp cuts rows; 0 for a module whose cp
        ranks repeat each other. attention: FLOPs of a row in a layer's attention, behind which they go.
      carried: bytes of a row on the way from a stage of it to the next. sent: on the way out of the module.
      held: what a row needs of a device, for every tp that divides the module's sizes.
      after: modules whose activations it takes. enters: of an encoder, LLM layers that it enters beside the first.
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
    recompute: Shares = Shares()
    real: Real | None = None
    sums: tuple[int, int] = (2, 2)
    ring: float = 0.0
    attention: float = 0.0
    carried: float = 0.0
    sent: float = 0.0
    held: Mapping[int, Held] = field(default_factory=dict, hash=False)
    after: tuple[str, ...] = ()
    enters: tuple[int, ...] = ()

    @property
    def whole(self) -> Part:
        """All of it."""
        return Part(layers=self.layers, first=True, last=True)

    @property
    def computed(self) -> float:
        """FLOPs of a row, forward and backward."""
        return self.forward.of(self.whole) + self.backward.of(self.whole)

    @property
    def no_padding(self) -> Real:
        """Of a sample, also where all of its rows are."""
        if self.real:
            return self.real
        return Real(positions=self.rows * self.width, flops=self.rows * (self.computed - self.recompute.of(self.whole)))

    @property
    def later(self) -> Shares:
        """FLOPs of a row's backward that are W's where it is split: two for each trained weight and position.

        A weight that is looked up or added is in no product, and needs no more than its forward.
        """
        pairs = zip(self.trained.each, self.forward.each, strict=True)
        return Shares(*(min(2 * own * self.width, ahead) for own, ahead in pairs))

    def context(self, layout: Layout) -> int:
        """How many cp ranks share the positions of a row."""
        return layout.cp if self.ring else 1

    @property
    def has_backward(self) -> bool:
        """Whether any of it has a backward."""
        return self.backward.of(self.whole) > 0

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """What each stage of a layout has."""
        runs = layout.runs(self.layers)
        last = len(runs) - 1
        return tuple(Part(layers=len(run), first=at == 0, last=at == last) for at, run in enumerate(runs))


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model on its data, as the planner sees it.

    Attributes:
      modules: by name, sources before users; one is "llm".
      global_batch: samples of a step.
      item: bytes of a number that is computed with: 2 or 4. In 4 the optimizer's copies serve as they are where a
        module has a dp of 1.
      gradient: bytes of a sum of gradients.
    """

    modules: Mapping[str, ModuleWork] = field(hash=False)
    global_batch: int
    item: int = 2
    gradient: int = 4

    @property
    def encoders(self) -> tuple[str, ...]:
        """Modules before the LLM."""
        return tuple(name for name in self.modules if name in self.modules[LLM].after)

    @property
    def generators(self) -> tuple[str, ...]:
        """Modules behind the LLM."""
        return tuple(name for name, module in self.modules.items() if LLM in module.after)

    def limited(self, tps: Callable[[str], Collection[int]]) -> Work:
        """The same with no tp of a module but these."""
        modules = {
            name: replace(module, held={tp: held for tp, held in module.held.items() if tp in tps(name)})
            for name, module in self.modules.items()
        }
        return replace(self, modules=modules)

    @property
    def flops(self) -> float:
        """Model FLOPs of a step, as a run's metrics count them: of real positions, without recompute."""
        return self.global_batch * sum(module.no_padding.flops for module in self.modules.values())

    @property
    def positions(self) -> float:
        """Of a step, that are no padding, in all modules."""
        return self.global_batch * sum(module.no_padding.positions for module in self.modules.values())
