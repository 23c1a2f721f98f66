"""Layouts: how one module is spread over ranks. Pure arithmetic, no JAX.

A rank is the index of a device in the world's fixed order. A module with a layout occupies the contiguous ranks
``rank_offset .. rank_offset + size``, pipeline stage outermost, then data, context and tensor parallelism:

    rank = rank_offset + ((pp_index · dp + dp_index) · cp + cp_index) · tp + tp_index

so a tp group is always made of neighbours (one node's fast links) and a stage submesh is one contiguous block.

A module has pp · chunks stages in the order of its layers; stage ``k`` lives on stage submesh ``k mod pp``. With more
than one chunk a submesh holds several short stages, far apart in the module, whose ops interleave (Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters", §2.2).

A module with lanes has one stage. Its ranks are cut into equal contiguous lanes of dp · cp · tp ranks, and microbatch
``m`` runs on lane ``m mod lanes`` ("BigMac", §3.1: an encoder beside each rank of the LLM's pipeline). Its parameters
are the same on all lanes, and its optimizer states are sharded over all of them.

A module with copies has one stage too. Its ranks are cut into equal contiguous copies of dp · cp · tp ranks, and all of
them compute the same rows of every microbatch (Jang et al., "Cornstarch", §2.2: an encoder in every stage of the LLM).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from mmjax.configurable import ConfigError, configurable, divides, nearest_divisor, one_of, require

CP_WAYS = ("gather", "need", "ring", "all-to-all")
"""How attention exchanges queries and keys among ranks of cp; see `mmjax.attention.exchange`."""
CP_TOKENS = ("lpt", "segments", "zigzag", "striped", "contiguous", "random")
"""How tokens are distributed over ranks of cp; see `mmjax.attention.distribution`."""
EP_WAYS = ("ring", "all-to-all")
"""How ranks with different experts exchange tokens; see `mmjax.models.experts.exchange`."""
SHARDS = ("states", "gradients", "parameters")
"""What is sharded over the ranks of an optimizer instance; see ``Layout.shard``."""
GATHERS = ("layer", "step", "pull")
"""How often sharded parameters are gathered; see ``Layout.gather``."""
DEGREES = ("dp", "pp", "chunks", "lanes", "copies", "cp", "tp", "ep", "optimizer_instances")
SPANNING = ("dp", "pp", "lanes", "copies", "cp", "tp")
"""The degrees whose product is the number of a module's ranks."""


@dataclass(frozen=True, kw_only=True)
class ModuleSizes:
    """The sizes of a module that its layout divides.

    Attributes:
      layers: number of layers.
      heads: query heads; 0 for a module without attention.
      by_tp: sizes that tp divides, by setting: {"llm/Decoder.heads": 32}.
      replicable: settings of those sizes that tp may be a multiple of instead: several ranks then have the same part.
      experts: number of experts of a layer; 0 for a module without.
      by_expert_tp: sizes that tp divides unless its ranks have whole experts, by setting.
    """

    layers: int
    heads: int = 0
    experts: int = 0
    by_tp: Mapping[str, int] = field(default_factory=dict)
    by_expert_tp: Mapping[str, int] = field(default_factory=dict)
    replicable: Collection[str] = ()


@configurable("Layout")
@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel degrees of one module and the first of its ranks.

    Attributes:
      dp: data parallel degree; with lanes that of one lane.
      pp: pipeline parallel degree: number of stage submeshes.
      chunks: stages of the module on each of its stage submeshes; more than one requires ``pp`` above 1.
      lanes: groups of dp·cp·tp ranks that take microbatches in turn; more than one requires pp 1. For an encoder or a
        generator that is spread over the ranks of the LLM's pipeline.
      copies: groups of dp·cp·tp ranks that all compute every microbatch; more than one requires pp and lanes 1. For an
        encoder that every pipeline stage of the LLM runs for itself.
      microbatches: microbatches that one forward and backward of an encoder takes together, in three-phase schedules;
        0 is all of a window. Its dp then divides their rows, not those of each microbatch.
      cp: context parallel degree: number of ranks that share the tokens of a row.
      cp_way: how these ranks exchange keys and values: ``gather`` (every rank receives all keys), ``need`` (only the
        keys that its queries may see), ``ring`` (keys travel from rank to rank) or ``all-to-all`` (a rank has all
        tokens of some heads; cp divides their number).
      cp_tokens: how blocks of tokens are distributed over these ranks. ``lpt`` gives all ranks the same number of
        tokens and about the same work. ``segments`` keeps whole media of an encoder or samples of an LLM on one rank,
        in rows where they fit, else as ``lpt``. ``contiguous`` leaves tokens where they are; the others are ``zigzag``,
        ``striped`` and ``random``.
      tp: tensor parallel degree.
      sp: sequence parallelism: ranks of tp share the tokens between a layer's products, also on edges inside the
        module, and gather them for the products. Without tp it changes nothing.
      overlap: whether the exchange for a product goes from rank to rank while parts of the product are computed;
        requires ``sp``.
      ep: expert parallel degree: number of ranks that share a layer's experts and compute them for each other's
        tokens. It divides ``dp * cp`` and takes no ranks of its own.
      ep_way: how these ranks exchange tokens: ``ring`` (all tokens go from rank to rank, beside the products of those
        before) or ``all-to-all`` (each token goes once to each rank with some of its experts).
      expert_tp: tensor parallel degree inside an expert: 0 for ``tp``, or 1: then ranks of tp have whole experts of
        their own (Cornstarch §4.3: expert parallelism in place of tensor parallelism).
      rank_offset: first rank of the module.
      optimizer_instances: number of groups that dp is cut into. Masters and moments are sharded over the dp and cp
        ranks of a group, and repeated across groups. It divides lanes·dp.
      shard: what is sharded over the dp and cp ranks of an optimizer instance: ``states`` (masters and moments:
        ZeRO-1), ``gradients`` (their sums too: backward scatters each layer's gradients in every microbatch, ZeRO-2) or
        ``parameters`` (the compute parameters too, frozen or not: ZeRO-3).
      gather: when sharded parameters are gathered: ``layer`` (each layer's for each use, again in backward, and its
        gradients are scattered), ``step`` (all of them once a step; then sums are whole until the step's end) or
        ``pull``, of a module with lanes (a lane copies all of them from the others before its forwards and backwards,
        and drops them behind; sums are whole until the step's end).
      layers: how many of the module's layers each pipeline stage has, such as (3, 5), in the order of the layers; ()
        splits them as equally as possible.

    Raises:
      ConfigError: when a degree is below 1, the offset below 0, ep does not divide dp·cp, several chunks share a
        module's only stage submesh, lanes or copies are several and pp is too, both lanes and copies are,
        optimizer_instances does not divide lanes·dp, overlap is without sp, or layers has not a number of 1 or more for
        each stage.
    """

    dp: int = 1
    pp: int = 1
    chunks: int = 1
    lanes: int = 1
    copies: int = 1
    microbatches: int = 1
    cp: int = 1
    cp_way: str = "gather"
    cp_tokens: str = "lpt"
    tp: int = 1
    sp: bool = True
    overlap: bool = False
    ep: int = 1
    ep_way: str = "ring"
    expert_tp: int = 0
    rank_offset: int = 0
    optimizer_instances: int = 1
    shard: str = "states"
    gather: str = "layer"
    layers: tuple[int, ...] = field(default=(), metadata={"example": (3, 5)})

    def __post_init__(self) -> None:
        for name in (*DEGREES, "rank_offset", "microbatches"):
            value, least = getattr(self, name), 1 if name in DEGREES else 0
            if value < least:
                raise ConfigError(f"Layout.{name}={value}: must be at least {least}; set it to {least}")
        fix = "ranks that share no tokens exchange none; set it to False, or Layout.sp to True"
        require(self.sp or not self.overlap, "Layout.overlap", self.overlap, fix)
        one_of("Layout.cp_way", self.cp_way, CP_WAYS)
        one_of("Layout.cp_tokens", self.cp_tokens, CP_TOKENS)
        one_of("Layout.ep_way", self.ep_way, EP_WAYS)
        if self.dp * self.cp % self.ep:
            raise ConfigError(f"Layout.ep={self.ep}: must divide dp*cp={self.dp * self.cp}; set it to 1")
        fix = "is 0, for the degree of Layout.tp, or 1, for whole experts on each rank of tp"
        require(self.expert_tp in (0, 1), "Layout.expert_tp", self.expert_tp, fix)
        if self.chunks > 1 and self.pp == 1:
            fix = "chunks interleave the stages of several stage submeshes and Layout.pp=1 has one; set it to 1"
            raise ConfigError(f"Layout.chunks={self.chunks}: {fix}")
        if self.lanes > 1 and self.pp > 1:
            fix = f"microbatches take lanes in turn, each through a whole module, and Layout.pp={self.pp}; set pp to 1"
            raise ConfigError(f"Layout.lanes={self.lanes}: {fix}")
        for name in ("lanes", "copies"):
            if self.microbatches != 1 and (degree := getattr(self, name)) > 1:
                fix = f"all ranks run it together, and Layout.{name}={degree}; set {name} to 1, or it to 1"
                raise ConfigError(f"Layout.microbatches={self.microbatches}: {fix}")
        for name in ("pp", "lanes"):
            if self.copies > 1 and (degree := getattr(self, name)) > 1:
                fix = f"a copy runs a whole module for every microbatch, and Layout.{name}={degree}; set {name} to 1"
                raise ConfigError(f"Layout.copies={self.copies}: {fix}")
        total = "Layout.dp" if self.lanes == 1 else "Layout.lanes*Layout.dp"
        divides("Layout.optimizer_instances", self.optimizer_instances, self.lanes * self.dp, total)
        fix = f"a group of Layout.optimizer_instances={self.optimizer_instances} has its ranks; use a divisor of"
        fits = self.lanes * self.dp // self.optimizer_instances % self.ep_degrees[0] == 0
        require(fits, "Layout.ep", self.ep, f"{fix} dp*cp/optimizer_instances={self.optimizer_shards}")
        one_of("Layout.shard", self.shard, SHARDS)
        fix = "a pipeline has microbatches of each stage in flight all the time, as 'step' has; set it to 'step'"
        require(self.gather != "stage", "Layout.gather", self.gather, fix)
        one_of("Layout.gather", self.gather, GATHERS)
        if self.lanes > 1 and self.scatters_gradients:
            fix = "a microbatch runs on one lane, whose program cannot exchange shards with the others"
            legal = "; set Layout.gather to 'pull'" if self.shard == "parameters" else "; set it to 'states'"
            raise ConfigError(f"Layout.shard={self.shard!r}: with Layout.lanes={self.lanes} {fix}{legal}")
        if self.layers:
            self._check_layers()

    def check(self, name: str, sizes: ModuleSizes) -> None:
        """Requires that the layout divides a module.

        Args:
          name: the module's name, for errors.
          sizes: the module's sizes.

        Raises:
          ConfigError: a degree does not divide a size, or is not supported.
        """
        self._check_experts(name, sizes.experts)
        fix = "lanes copy from each other, and Layout.lanes=1: ranks run their ops together; set it to 'layer'"
        is_idle = self.shard != "parameters" or self.optimizer_shards == 1
        require(self.gather != "pull" or self.lanes > 1 or is_idle, f"{name}/Layout.gather", self.gather, fix)
        self.check_layers(name, sizes.layers)
        by_tp = {**sizes.by_tp, **({} if self.expert_tp == 1 else sizes.by_expert_tp)}
        legal = nearest_divisor(self.tp, math.gcd(*by_tp.values()))
        for setting, size in by_tp.items():
            is_replicated = setting in sizes.replicable and self.tp % size == 0
            fix = f"must divide {setting} ({size}); use {legal}"
            require(size % self.tp == 0 or is_replicated, f"{name}/Layout.tp", self.tp, fix)
        heads = sizes.heads // self.tp
        fix = f"cp={self.cp} does not divide the {heads} query heads of a tp rank; use 'gather' or 'ring'"
        is_divided = self.cp == 1 or self.cp_way != "all-to-all" or heads % self.cp == 0
        require(is_divided, f"{name}/Layout.cp_way", self.cp_way, fix)

    def _check_experts(self, name: str, experts: int) -> None:
        fix = "the module has no experts; set it to 1"
        require(experts > 0 or self.ep == 1, f"{name}/Layout.ep", self.ep, fix)
        fix = f"{self.expert_ranks} ranks share {experts} experts, which it must divide; use another"
        require(experts % self.expert_ranks == 0, f"{name}/Layout.ep", self.ep, fix)

    def check_layers(self, name: str, layers: int) -> None:
        """Requires that every stage of the module ``name`` has one of its ``layers`` layers, and every layer a stage.

        Raises:
          ConfigError: there are fewer layers than stages, or the field ``layers`` does not sum to the module's layers.
        """
        fix = f"a stage needs a layer and there are {layers}; use {layers} or less"
        require(self.pp <= layers, f"{name}/Layout.pp", self.pp, fix)
        fix = f"pp * chunks = {self.stages} stages need a layer each and there are {layers}; use {layers // self.pp}"
        require(self.stages <= layers, f"{name}/Layout.chunks", self.chunks, fix)
        even = tuple(map(len, split_layers(layers, self.stages)))
        fix = f"sums to {sum(self.layers)} and there are {layers}; use {even}, or () for as equal as possible"
        require(sum(self.layers or even) == layers, f"{name}/Layout.layers", self.layers, fix)

    def idle(self) -> dict[str, str]:
        """Fields that have no effect in this layout, such as "cp_way", each with the reason as text."""
        reasons = {}
        if self.cp == 1:
            reasons |= dict.fromkeys(("cp_way", "cp_tokens"), "with Layout.cp=1 a rank has whole rows")
        if self.tp == 1:
            reasons |= dict.fromkeys(("sp", "overlap"), "with Layout.tp=1 no ranks share a product")
        if self.ep == 1:
            reasons["ep_way"] = "with Layout.ep=1 a rank has all experts"
        if self.shard != "parameters":
            reasons["gather"] = f"with Layout.shard={self.shard!r} parameters are whole"
        if self.optimizer_shards == 1:
            reasons |= dict.fromkeys(("shard", "gather"), "no ranks share the masters and moments")
        if self.stages == 1:
            reasons["layers"] = "the module has one stage, which has all of them"
        return reasons

    def _check_layers(self) -> None:
        total = sum(self.layers)
        even = tuple(map(len, split_layers(total, self.stages))) if total >= self.stages else ()
        fix = f"must have a number for each of the pp * chunks = {self.stages} stages; use {even}"
        require(len(self.layers) == self.stages, "Layout.layers", self.layers, fix)
        fix = f"a stage needs a layer; use {even}"
        require(min(self.layers) >= 1, "Layout.layers", self.layers, fix)

    @property
    def ep_degrees(self) -> tuple[int, int]:
        """The parts of ep that are ranks of dp and of cp: as many of cp as it has, since these are neighbours."""
        of_cp = math.gcd(self.ep, self.cp)
        return self.ep // of_cp, of_cp

    @property
    def replica_size(self) -> int:
        """Number of ranks that compute the same rows together: cp·tp, within one copy."""
        return self.cp * self.tp

    @property
    def takes_several(self) -> bool:
        """Whether a forward takes several microbatches of a window, or may: ``microbatches`` is not 1."""
        return self.microbatches != 1

    def op_microbatches(self, window: int) -> int:
        """Microbatches that a forward takes together, of a window of so many: ``microbatches``, or all for 0."""
        return min(self.microbatches or window, window)

    @property
    def shares_tokens(self) -> bool:
        """Whether ranks of tp have different tokens between a layer's products (sequence parallelism)."""
        return self.sp and self.tp > 1

    @property
    def row_multiple(self) -> int:
        """The number that divides the positions of a module's rows: cp, times tp with sequence parallelism.

        For an encoder or a generator it divides the tokens that a row gives to the LLM.
        """
        return self.cp * (self.tp if self.shares_tokens else 1)

    @property
    def stages(self) -> int:
        """Number of pipeline stages of the module: pp·chunks."""
        return self.pp * self.chunks

    @property
    def stage_size(self) -> int:
        """Number of ranks of one stage submesh: lanes·copies·dp·cp·tp."""
        return self.lanes * self.copies * self.dp * self.replica_size

    @property
    def across_lanes(self) -> Layout:
        """The layout of optimizer states, reduction and update, which span all lanes: one lane with dp = lanes·dp."""
        return self if self.lanes == 1 else replace(self, lanes=1, dp=self.lanes * self.dp)

    def lane(self, lane: int) -> Layout:
        """The layout of lane number ``lane``, from 0, alone: its ranks, one lane and optimizer instance, and no shards.

        It is this layout itself if there is one lane.
        """
        if self.lanes == 1:
            return self
        size = self.dp * self.replica_size
        first = self.rank_offset + lane * size
        return replace(self, lanes=1, optimizer_instances=1, shard=SHARDS[0], rank_offset=first)

    @property
    def optimizer_shards(self) -> int:
        """Number of ranks that share one copy of masters and moments: lanes·dp·cp / optimizer_instances."""
        return self.lanes * self.dp * self.cp // self.optimizer_instances

    @property
    def gathers_layers(self) -> bool:
        """Whether compute parameters are shards, which are gathered layer by layer."""
        return self.shard == "parameters" and self.gather == "layer" and self.optimizer_shards > 1

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that have different experts of a layer."""
        return self.ep * (self.tp if self.expert_tp == 1 else 1)

    @property
    def pulls(self) -> bool:
        """Whether compute parameters are shards, which a lane gathers before its ops (see ``gather``)."""
        return self.shard == "parameters" and self.gather == "pull" and self.optimizer_shards > 1

    @property
    def shards_parameters(self) -> bool:
        """Whether compute parameters are shards between the ops that use them."""
        return self.gathers_layers or self.pulls

    @property
    def scatters_gradients(self) -> bool:
        """Whether the sums of gradients are shards, to which each microbatch's backward scatters its gradients."""
        return self.gathers_layers or (self.shard == "gradients" and self.optimizer_shards > 1)

    @property
    def size(self) -> int:
        """Number of ranks of the whole module."""
        return self.pp * self.stage_size

    @property
    def end(self) -> int:
        """The first rank after the module."""
        return self.rank_offset + self.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the module, ascending."""
        return tuple(range(self.rank_offset, self.end))

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Ranks of pipeline stage ``stage``, those of stage submesh ``stage mod pp``.

        They are in the order (lane or copy, dp, cp, tp).

        Raises:
          IndexError: when the layout has no such stage; its ranks would be another module's.
        """
        if not 0 <= stage < self.stages:
            raise IndexError(
                f"stage {stage} of Layout.pp={self.pp}, chunks={self.chunks}: use a stage from 0 to {self.stages - 1}"
            )
        first = self.first_rank(stage)
        return tuple(range(first, first + self.stage_size))

    def first_rank(self, stage: int) -> int:
        """The first rank of pipeline stage ``stage``, a number from 0 to ``stages`` - 1, which is not checked."""
        return self.rank_offset + stage % self.pp * self.stage_size

    def runs(self, layers: int) -> tuple[range, ...]:
        """Cuts ``layers`` layers into a range of layer numbers for each stage, in the order of stages.

        The field ``layers`` decides, whatever its sum, or if it is (), ``split_layers``.
        """
        if not self.layers:
            return split_layers(layers, self.stages)
        ends = tuple(itertools.accumulate(self.layers))
        return tuple(range(end - count, end) for end, count in zip(ends, self.layers, strict=True))

    def describe(self) -> str:
        """The degrees above one and the rank range, for messages: ``pp=2 tp=2 layers=3+5 on ranks 0-3``."""
        parts = [f"{n}={getattr(self, n)}" for n in DEGREES if getattr(self, n) > 1]
        if self.cp > 1:
            parts += [f"cp_way={self.cp_way}"] if self.cp_way != CP_WAYS[0] else []
            parts += [f"cp_tokens={self.cp_tokens}"] if self.cp_tokens != CP_TOKENS[0] else []
        parts += [f"microbatches={self.microbatches}"] if self.takes_several else []
        parts += [f"ep_way={self.ep_way}"] if self.ep > 1 and self.ep_way != EP_WAYS[0] else []
        parts += [f"expert_tp={self.expert_tp}"] if self.tp > 1 and self.expert_tp else []
        parts += [f"shard={self.shard}"] if self.shard != SHARDS[0] else []
        parts += [f"gather={self.gather}"] if self.shard == "parameters" and self.gather != GATHERS[0] else []
        parts += [f"layers={'+'.join(map(str, self.layers))}"] if self.layers else []
        return f"{' '.join(parts) or 'one device'} on {show_range(self.rank_offset, self.rank_offset + self.size - 1)}"


def split_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Ranges of layer numbers, one for each stage, which follow one another and are as equal as possible.

    The first and the last stage also hold the embedding and the head, so spare layers go to the middle first, then to
    the first stage: (range(0, 2), range(2, 5), range(5, 7)) for 7 layers and 3 stages. Numbers count from 0.
    """
    base, surplus = divmod(layers, stages)
    order = sorted(range(stages), key=lambda s: (s in (0, stages - 1), s))
    extra = set(order[:surplus])
    runs, start = [], 0
    for stage in range(stages):
        count = base + (stage in extra)
        runs.append(range(start, start + count))
        start += count
    return tuple(runs)


def cell_count(layouts: Iterable[Layout]) -> int:
    """Number of cells of a microbatch: the least common multiple of the dp of modules' layouts.

    Modules that take several microbatches together do not count: their dp divides the rows of all of these.
    """
    return math.lcm(*(layout.dp for layout in layouts if not layout.takes_several))


def show_range(first: int, last: int) -> str:
    """The ranks from ``first`` to ``last``, both included, as text: ``rank 3`` or ``ranks 0-3``."""
    return f"rank {first}" if first == last else f"ranks {first}-{last}"
