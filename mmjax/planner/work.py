"""What each module of a model has to do for one row of its data: FLOPs, parameters, bytes. No device, no time.

A module is equal layers between two ends: a stem or embedding before the first, a projector, head or loss behind the
last. So a pipeline stage is described by how many layers it has and which ends (`Part`), and every quantity of a module
by three numbers (`Shares`). A row is what its data are padded to: `width` positions, all of them computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmjax.mesh.layout import Layout, split_layers
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


@dataclass(frozen=True, kw_only=True)
class Shares:
    """A quantity of a module by where it arises: before the first layer, in each layer, behind the last."""

    first: float = 0.0
    layer: float = 0.0
    last: float = 0.0

    def of(self, part: Part) -> float:
        """The quantity of a part."""
        return self.layer * part.layers + self.first * part.first + self.last * part.last

    def times(self, factor: float) -> Shares:
        """All three so many times."""
        return Shares(first=self.first * factor, layer=self.layer * factor, last=self.last * factor)


@dataclass(frozen=True, kw_only=True)
class ModuleWork:
    """What a module has to do.

    Attributes:
      name: of the module. An encoder's work includes its projector's, a generator's too.
      layers: how many.
      model_width: of its activations.
      width: positions of a row.
      rows: of a sample; not whole where samples are packed.
      tps: every tp that divides its sizes.
      forward, backward: FLOPs of a row; a backward's include recompute.
      parameters: all of them. trained: those that have gradients and optimizer states.
      sums: all-reduces of a layer's activations in a forward, and in a backward, over a tp group. None where tp is 1.
      carried: bytes of a row on the way from a stage of it to the next. sent: on the way out of the module.
      kept: by tp, bytes that a device keeps of a row from forward to backward.
      temporary: by tp, bytes that a program needs for a row while it runs; of a layer once, not once a layer.
      after: modules whose activations it takes. enters: of an encoder, LLM layers that it enters beside the first.
    """

    name: str
    layers: int
    model_width: int
    width: int
    rows: float
    tps: tuple[int, ...]
    forward: Shares
    backward: Shares
    parameters: Shares
    trained: Shares
    sums: tuple[int, int] = (2, 2)
    carried: float = 0.0
    sent: float = 0.0
    kept: Mapping[int, Shares] = field(default_factory=dict, hash=False)
    temporary: Mapping[int, Shares] = field(default_factory=dict, hash=False)
    after: tuple[str, ...] = ()
    enters: tuple[int, ...] = ()

    @property
    def whole(self) -> Part:
        """All of it."""
        return Part(layers=self.layers, first=True, last=True)

    @property
    def has_backward(self) -> bool:
        """Whether any of it has a backward."""
        return self.backward.of(self.whole) > 0

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """What each stage of a layout has."""
        runs = split_layers(self.layers, layout.stages)
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
      about: one line on where the figures are from.
    """

    modules: Mapping[str, ModuleWork] = field(hash=False)
    global_batch: int
    item: int = 2
    about: str = ""

    @property
    def encoders(self) -> tuple[str, ...]:
        """Modules before the LLM."""
        return tuple(name for name in self.modules if name in self.modules[LLM].after)

    @property
    def generators(self) -> tuple[str, ...]:
        """Modules behind the LLM."""
        return tuple(name for name, module in self.modules.items() if LLM in module.after)

    @property
    def flops(self) -> float:
        """Model FLOPs of a step, of padded rows, without recompute where `backward` has none."""
        return self.global_batch * sum(
            module.rows * (module.forward.of(module.whole) + module.backward.of(module.whole))
            for module in self.modules.values()
        )
