"""What a compiled program computes, moves and sends, and how long that takes at given rates.

An instruction takes as long as its FLOPs at the rate of their kind or its bytes at the memory's, whichever is longer;
instructions follow each other. A collective lies beside what the program has between its start and its end; two more
times are those with no collective beside anything, and with all. Rates are assumptions.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from mmjax import jax_compat
from studies.h100.hlo import Computation, Instruction, Module, Shape

_FREE = frozenset(
    {
        *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota", "partition-id"),
        *("opt-barrier", "async-done", "replica-id", "all-reduce-done", "all-gather-done", "collective-permute-done"),
    }
)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that a device reaches.

    Attributes:
      products: FLOPs per second of products of bf16.
      products32: of fp32, in TF32.
      forward, backward: of fused attention.
      memory: bytes per second.
      link: bytes per second that a device sends in a collective.
      latency: seconds that a collective takes at least.
    """

    products: float = 600e12
    products32: float = 250e12
    forward: float = 500e12
    backward: float = 400e12
    memory: float = 2.9e12
    link: float = 360e9
    latency: float = 8e-6


H100 = Rates()
"""Assumed: 61 % of the datasheet's peak in products, half and less in attention, 87 % of its bandwidth, 80 % of
NVLink's."""


@dataclass
class Sent:
    """Collectives of one kind: how many, and the bytes of their largest operand or result."""

    count: float = 0.0
    bytes: float = 0.0


@dataclass
class Work:
    """What a device does in one run of a program.

    Attributes:
      flops: by kind, "products", "products32" and "attention".
      seconds: by kind, with "memory" for what has no products, and "collectives".
      shown: seconds of collectives that nothing lies beside, as the program is ordered.
      bytes: read and written.
      sent: by kind of collective.
      targets: how often each custom call runs.
    """

    flops: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    shown: float = 0.0
    bytes: float = 0.0
    sent: dict[str, Sent] = field(default_factory=lambda: defaultdict(Sent))
    targets: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def computing(self) -> float:
        """Seconds without collectives."""
        return sum(seconds for kind, seconds in self.seconds.items() if kind != "collectives")

    @property
    def ordered(self) -> float:
        """Seconds as the program is ordered."""
        return self.computing + self.shown

    @property
    def total(self) -> float:
        """Seconds where no collective lies beside a computation."""
        return self.computing + self.seconds["collectives"]

    @property
    def hidden(self) -> float:
        """Seconds where all collectives lie beside computations."""
        return max(self.computing, self.seconds["collectives"])

    def chunked(self, chunks: int) -> float:
        """Seconds where each collective is cut, and all of it but a first chunk lies beside computations."""
        shown = self.seconds["collectives"] / chunks
        return shown + max(self.computing, self.seconds["collectives"] - shown)


def work_of(module: Module, rates: Rates = H100, *, branch: int = 0, trips: float = 1.0) -> Work:
    """The work of a program; for ``branch`` and ``trips`` see ``Module.run``."""
    work, open_ = Work(), _Open()
    for times, computation, one in module.run(branch, trips):
        if one.kind.endswith("-done"):
            work.shown += times * open_.rest(one)
        if one.kind in _FREE:
            continue
        kind = one.kind.removesuffix("-start")
        if kind in COLLECTIVES:
            seconds = _add_collective(work, times, computation, one, kind, rates)
            if one.kind == kind or '"is_sync":true' in one.text:
                work.shown += times * seconds
            else:
                open_.begin(one, seconds, times)
            continue
        if one.target:
            work.targets[one.target] += times
        kind, flops, rate = _flops(module, computation, one, rates)
        moved = _bytes(module, computation, one)
        took = max(flops / rate, moved / rates.memory)
        work.flops[kind] += times * flops
        work.bytes += times * moved
        work.seconds[kind if flops else "memory"] += times * took
        open_.compute(took * times)
    return work


class _Open:
    """Collectives that have begun and not ended; one after another on one wire."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}

    def begin(self, one: Instruction, seconds: float, times: float) -> None:
        self._left[one.name] = seconds, times

    def compute(self, seconds: float) -> None:
        """Something lies beside the first of them, for so many seconds in all its runs."""
        for name, (left, times) in self._left.items():
            if left:
                self._left[name] = max(0.0, left - seconds / times), times
                return

    def rest(self, done: Instruction) -> float:
        """Seconds of a collective that were still left when it was awaited."""
        left, _ = self._left.pop(done.operands[0], (0.0, 0.0)) if done.operands else (0.0, 0.0)
        return left


# ---- products and attention ------------------------------------------------------------------------------------------


def _flops(module: Module, computation: Computation, one: Instruction, rates: Rates) -> tuple[str, float, float]:
    """Kind, number and rate of an instruction's FLOPs."""
    if "fmha" in one.target:
        backward = "Backward" in one.target
        return "attention", _attention(one) * (2.5 if backward else 1), rates.backward if backward else rates.forward
    found = list(_products(module, computation, one))
    if any(dtype == "f32" for dtype, _ in found):
        return "products32", sum(flops for _, flops in found), rates.products32
    return "products", sum(flops for _, flops in found), rates.products


def _attention(one: Instruction) -> float:
    """FLOPs of a forward by cuDNN: two products of the pairs that its mask allows; packed rows count as whole ones."""
    config = json.loads(one.text[one.text.index("backend_config=") + len("backend_config=") :])
    call = config["cudnn_fmha_backend_config"]
    rows, heads, queries, keys = map(int, call["intermediate_tensor_shape"]["dimensions"])
    pairs = float(queries * keys)
    if "CAUSAL" in call["mask_type"]:
        window = min(int(call.get("sliding_window_length", 0)) or queries, queries)
        pairs = window * (window + 1) / 2 + (queries - window) * window
    return 4.0 * rows * heads * pairs * one.results[0].dimensions[-1]


def _products(module: Module, computation: Computation, one: Instruction) -> Iterator[tuple[str, float]]:
    """Dtype of the operands and FLOPs of each product in an instruction."""
    if one.kind == "fusion":
        for called in one.called:
            inner = module.computations[called]
            for part in inner.values():
                yield from _products(module, inner, part)
    elif one.kind == "dot" or "__cublas" in one.target:
        found = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)[\]}]', one.text)
        left = computation[one.operands[0]].results[0]
        inner_size = 1
        for dimension in re.findall(r"\d+", found.group(1) if found else ""):
            inner_size *= left.dimensions[int(dimension)]
        yield left.dtype, 2.0 * one.results[0].size * inner_size


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _bytes(module: Module, computation: Computation, one: Instruction) -> float:
    """Bytes that an instruction reads and writes; slices count as what is taken, updates in place as what is put."""
    operands = [_whole(computation[name]) for name in one.operands if name in computation]
    if one.kind == "fusion":
        inner = module.computations[one.called[0]]
        return sum(_read(inner, n, whole) for n, whole in enumerate(operands)) + _written(inner)
    if one.kind in ("dynamic-slice", "slice", "gather"):
        return 2.0 * _whole(one)
    if one.kind in ("dynamic-update-slice", "scatter"):
        return 2.0 * (operands[1] if one.kind == "dynamic-update-slice" else operands[-1])
    if one.target:  # a workspace is no result
        results = [shape.bytes for shape in one.results if shape.dtype not in ("s8", "u8")]
        return float(sum(operands) + sum(results))
    return float(sum(operands) + _whole(one))


def _whole(one: Instruction) -> int:
    return sum(shape.bytes for shape in one.results)


def _read(inner: Computation, number: int, whole: int) -> float:
    """Bytes that a fusion reads of an operand."""
    given = next((p for p in inner.values() if p.kind == "parameter" and p.text.startswith(f"{number})")), None)
    if given is None:
        return whole
    readers = list(_readers(inner, given.name))
    if readers and all(reader.kind in ("dynamic-slice", "slice", "gather") for reader in readers):
        return min(whole, sum(map(_whole, readers)))
    if readers and all(reader.kind == "dynamic-update-slice" for reader in readers):
        into = [_source(inner, reader.operands[0]) == given.name for reader in readers]
        return 0.0 if all(into) else whole
    return whole


def _readers(inner: Computation, name: str) -> Iterator[Instruction]:
    """The instructions that read a value, also as another shape."""
    for one in inner.values():
        if name in one.operands:
            if one.kind == "bitcast":
                yield from _readers(inner, one.name)
            else:
                yield one


def _source(inner: Computation, name: str) -> str:
    while inner[name].kind == "bitcast":
        name = inner[name].operands[0]
    return name


def _written(inner: Computation) -> float:
    """Bytes that a fusion writes."""

    def of(name: str) -> float:
        one = inner[_source(inner, name)]
        if one.kind == "tuple":
            return sum(map(of, one.operands))
        return _whole(inner[one.operands[1]]) if one.kind == "dynamic-update-slice" else _whole(one)

    return sum(of(one.name) for one in inner.values() if one.is_root)


# ---- collectives -----------------------------------------------------------------------------------------------------


def _add_collective(
    work: Work, times: float, computation: Computation, one: Instruction, kind: str, rates: Rates
) -> float:
    """Seconds of a ring: a device sends (n - 1) / n of the whole array, of an all-reduce twice that."""
    operands = [_whole(computation[name]) for name in one.operands if name in computation]
    whole = max([*(shape.bytes for shape in one.results), *operands])
    if len(one.operands) > 1:  # several arrays in one collective
        whole = max(sum(operands), _whole(one) - (sum(operands) if one.kind.endswith("-start") else 0))
    ranks = _group(one.text)
    share = 1.0 if kind == "collective-permute" else (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
    work.sent[kind].count += times
    work.sent[kind].bytes += times * whole
    if ranks == 1 and kind != "collective-permute":
        return 0.0
    seconds = whole * share / rates.link + rates.latency
    work.seconds["collectives"] += times * seconds
    return seconds


def _group(text: str) -> int:
    """Ranks of a collective's first group."""
    has_groups = re.search(r"replica_groups=(?!\{\})", text)  # none are printed where all devices are one
    return len(jax_compat.replica_groups(text)[0]) if has_groups else 1


# ---- arrays ----------------------------------------------------------------------------------------------------------


def pair_arrays(module: Module, tokens: int) -> list[Shape]:
    """Arrays with a dimension of a row's tokens twice or more: scores or masks of all pairs."""
    return [shape for shape in module.arrays if shape.dimensions.count(tokens) > 1]


def logit_arrays(module: Module, tokens: int, vocab: int) -> list[Shape]:
    """fp32 arrays of the logits of all tokens of a microbatch."""
    wide = (shape for shape in module.arrays if shape.dtype == "f32" and vocab in shape.dimensions)
    return [shape for shape in wide if shape.size == tokens * vocab]
