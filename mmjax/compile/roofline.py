"""The work of a compiled program: FLOPs, bytes and collectives, and their seconds at given rates.

An instruction takes as long as its FLOPs at the rate of their kind or its bytes at the memory's, whichever is longer;
instructions follow each other. A collective lies beside what the program has between its start and its end; two more
times are those with no collective beside anything, and with all. Rates are assumptions.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mmjax.compile.hlo import Computation, Instruction, Module, Shape, replica_groups
from mmjax.compile.rates import H100, Rates

_FREE = frozenset(
    {
        *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota", "partition-id"),
        *("opt-barrier", "async-done", "replica-id", "all-reduce-done", "all-gather-done", "collective-permute-done"),
        *("copy-done", "conditional"),
    }
)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


@dataclass
class Collectives:
    """Collectives of one kind: how many, and the bytes of their largest operand or result."""

    count: float = 0.0
    bytes: float = 0.0


@dataclass
class Work:
    """The work of a device in one run of a program.

    Attributes:
      flops: by kind, "products", "products32", "grouped" (of experts) and "attention".
      seconds: by kind, with "memory" for what has no products, and "collectives".
      shown: seconds of collectives that nothing lies beside, as the program is ordered.
      bytes: read and written.
      collectives: by kind of collective.
      targets: how often each custom call runs.
      kernels: instructions that launch something on a device, and ``launches``: how often they run.
      conditionals: how often one runs; the host waits for its index.
      products: how often a product runs by dtypes of its factors and result, "bf16 x bf16 -> f32".
      accumulating: how often a product runs that adds to an accumulator in place, in cuBLASLt (beta = 1).
    """

    flops: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    shown: float = 0.0
    bytes: float = 0.0
    collectives: dict[str, Collectives] = field(default_factory=lambda: defaultdict(Collectives))
    targets: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kernels: int = 0
    launches: float = 0.0
    conditionals: float = 0.0
    products: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    accumulating: float = 0.0

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


def work_of(
    module: Module,
    rates: Rates = H100,
    *,
    branch: int = 0,
    trips: float = 1.0,
    ranks: Sequence[int] = (),
    routed: float = 1.0,
) -> Work:
    """The work of a program.

    Args:
      module: the program.
      rates: of its devices.
      branch, trips: see ``Module.run``.
      ranks: ranks of the program's devices, ``rates.node`` of them a node; () for devices of one node.
      routed: share of the rows of grouped products that hold a token's choice; kernels skip the others.
    """
    work, open_ = Work(), _Open()
    for times, computation, instruction in module.run(branch, trips):
        if instruction.kind.endswith("-done"):
            work.shown += times * open_.rest(instruction)
        work.conditionals += times * (instruction.kind == "conditional")
        if instruction.kind in _FREE:
            continue
        work.kernels += 1
        work.launches += times
        kind = instruction.kind.removesuffix("-start")
        if kind in COLLECTIVES:
            seconds = _add_collective(work, times, computation, instruction, kind, rates, ranks)
            if instruction.kind == kind or '"is_sync":true' in instruction.text:
                work.shown += times * seconds
            else:
                open_.begin(instruction, seconds, times)
            continue
        if instruction.target:
            work.targets[instruction.target] += times
        _add_computation(work, times, module, computation, instruction, rates, open_, routed)
    return work


def _add_computation(
    work: Work,
    times: float,
    module: Module,
    computation: Computation,
    instruction: Instruction,
    rates: Rates,
    open_: _Open,
    routed: float,
) -> None:
    products = [] if "fmha" in instruction.target else list(_products(module, computation, instruction))
    for dtypes, _ in products:
        work.products[dtypes] += times
    work.accumulating += times * _accumulates(instruction)
    kind, flops, rate = _flops(instruction, products, rates)
    if grouped := _grouped(computation, instruction):
        kind, flops, rate = "grouped", grouped * routed, rates.grouped
    moved = _bytes(module, computation, instruction)
    took = max(flops / rate, moved / rates.memory)
    work.flops[kind] += times * flops
    work.bytes += times * moved
    work.seconds[kind if flops else "memory"] += times * took
    open_.compute(took * times)


class _Open:
    """Collectives that have begun and not ended; one after another on one wire."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}

    def begin(self, instruction: Instruction, seconds: float, times: float) -> None:
        self._left[instruction.name] = seconds, times

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


def _flops(instruction: Instruction, products: Sequence[tuple[str, float]], rates: Rates) -> tuple[str, float, float]:
    """Kind, number and rate of an instruction's FLOPs; ``products`` are those in it."""
    if "fmha" in instruction.target:
        backward = "Backward" in instruction.target
        return (
            "attention",
            _attention(instruction) * (2.5 if backward else 1),
            rates.backward if backward else rates.forward,
        )
    flops = sum(flops for _, flops in products)
    if any(dtypes.startswith("f32") for dtypes, _ in products):
        return "products32", flops, rates.products32
    return "products", flops, rates.products


def _grouped(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of a kernel of ``experts.grouped_kernels`` over all rows, whose number is in its name; 0 for others."""
    name = re.search(r'op_name="[^"]*grouped_(product|weight_gradient)_of_(\d+)_rows\b', instruction.text)
    if not name or not instruction.target:
        return 0.0
    rows, result = int(name[2]), instruction.results[0].dimensions
    if name[1] == "weight_gradient":
        return 2.0 * rows * result[-2] * result[-1]
    arrays = [computation[operand].results[0].dimensions for operand in instruction.operands]
    widths = (dimensions[1] for dimensions in arrays if len(dimensions) == 2)
    return 2.0 * rows * result[-1] * sum(widths)


def _accumulates(instruction: Instruction) -> bool:
    """Whether an instruction is a product of cuBLAS that adds to its result."""
    return "__cublas" in instruction.target and bool(re.search(r'"beta":(?!0[,}])', instruction.text))


def _attention(instruction: Instruction) -> float:
    """FLOPs of a forward by cuDNN: two products of the pairs that its mask allows; packed rows count as whole ones."""
    config = json.loads(instruction.text[instruction.text.index("backend_config=") + len("backend_config=") :])
    call = config["cudnn_fmha_backend_config"]
    rows, heads, queries, keys = map(int, call["intermediate_tensor_shape"]["dimensions"])
    pairs = float(queries * keys)
    if "CAUSAL" in call["mask_type"]:
        window = min(int(call.get("sliding_window_length", 0)) or queries, queries)
        pairs = window * (window + 1) / 2 + (queries - window) * window
    return 4.0 * rows * heads * pairs * instruction.results[0].dimensions[-1]


def _products(module: Module, computation: Computation, instruction: Instruction) -> Iterator[tuple[str, float]]:
    """Dtypes, as in ``Work.products``, and FLOPs of each product in an instruction."""
    if instruction.kind == "fusion":
        for called in instruction.called:
            inner = module.computations[called]
            for part in inner.values():
                yield from _products(module, inner, part)
    elif instruction.kind == "dot" or "__cublas" in instruction.target:
        match = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)[\]}]', instruction.text)
        left, right = (computation[operand].results[0] for operand in instruction.operands[:2])
        inner_size = 1
        for dimension in re.findall(r"\d+", match.group(1) if match else ""):
            inner_size *= left.dimensions[int(dimension)]
        dtypes = f"{left.dtype} x {right.dtype} -> {instruction.results[0].dtype}"
        yield dtypes, 2.0 * instruction.results[0].size * inner_size
    elif "__cudnn$conv" in instruction.target:
        yield _convolution(computation, instruction)


def _convolution(computation: Computation, instruction: Instruction) -> tuple[str, float]:
    """Dtypes and FLOPs of a convolution of cuDNN: each place of its output reads one kernel of all input channels.

    Labels, such as "b01f_o01i->b01f", are those of the forward convolution in its gradients too.
    """
    first, second = (computation[operand].results[0] for operand in instruction.operands[:2])
    result = instruction.results[0]
    output, kernel = result, second
    if "BackwardInput" in instruction.target:
        output = first
    elif "BackwardFilter" in instruction.target:
        output, kernel = second, result
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.text)
    channels = kernel.dimensions[labels[1].index("o")] if labels else 1
    return f"{first.dtype} x {second.dtype} -> {result.dtype}", 2.0 * output.size * kernel.size / channels


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes that an instruction reads and writes; of arrays that are sliced or updated in place, the slice alone."""
    operands = [_whole(computation[name]) for name in instruction.operands if name in computation]
    if instruction.kind == "fusion":
        inner = module.computations[instruction.called[0]]
        return sum(_read(inner, n, size) for n, size in enumerate(operands)) + _written(inner)
    if instruction.kind in ("dynamic-slice", "slice", "gather"):
        return 2.0 * _whole(instruction)
    if instruction.kind in ("dynamic-update-slice", "scatter"):
        return 2.0 * (operands[1] if instruction.kind == "dynamic-update-slice" else operands[-1])
    if instruction.target:  # a workspace is no result
        results = [shape.bytes for shape in instruction.results if shape.dtype not in ("s8", "u8")]
        return float(sum(operands) + sum(results))
    return float(sum(operands) + _whole(instruction))


def _whole(instruction: Instruction) -> int:
    return sum(shape.bytes for shape in instruction.results)


def _read(inner: Computation, number: int, size: int) -> float:
    """Bytes that a fusion reads of an operand."""
    parameter = next((p for p in inner.values() if p.kind == "parameter" and p.text.startswith(f"{number})")), None)
    if parameter is None:
        return size
    readers = list(_readers(inner, parameter.name))
    if readers and all(reader.kind in ("dynamic-slice", "slice", "gather") for reader in readers):
        return min(size, sum(map(_whole, readers)))
    if readers and all(reader.kind == "dynamic-update-slice" for reader in readers):
        into = [_source(inner, reader.operands[0]) == parameter.name for reader in readers]
        return 0.0 if all(into) else size
    return size


def _readers(inner: Computation, name: str) -> Iterator[Instruction]:
    """The instructions that read a value, also as another shape."""
    for instruction in inner.values():
        if name in instruction.operands:
            if instruction.kind == "bitcast":
                yield from _readers(inner, instruction.name)
            else:
                yield instruction


def _source(inner: Computation, name: str) -> str:
    while inner[name].kind == "bitcast":
        name = inner[name].operands[0]
    return name


def _written(inner: Computation) -> float:
    """Bytes that a fusion writes."""

    def of(name: str) -> float:
        instruction = inner[_source(inner, name)]
        if instruction.kind == "tuple":
            return sum(map(of, instruction.operands))
        return (
            _whole(inner[instruction.operands[1]])
            if instruction.kind == "dynamic-update-slice"
            else _whole(instruction)
        )

    return sum(of(instruction.name) for instruction in inner.values() if instruction.is_root)


# ---- collectives -----------------------------------------------------------------------------------------------------


def _add_collective(
    work: Work,
    times: float,
    computation: Computation,
    instruction: Instruction,
    kind: str,
    rates: Rates,
    ranks: Sequence[int],
) -> float:
    """Seconds of a ring: a device sends (n - 1) / n of the whole array, of an all-reduce twice that."""
    operands = [_whole(computation[name]) for name in instruction.operands if name in computation]
    size = max([*(shape.bytes for shape in instruction.results), *operands])
    if len(instruction.operands) > 1:  # several arrays in one collective
        size = max(sum(operands), _whole(instruction) - (sum(operands) if instruction.kind.endswith("-start") else 0))
    group = _group(instruction.text, ranks)
    count = len(group)
    share = 1.0 if kind == "collective-permute" else (count - 1) / count * (2 if kind == "all-reduce" else 1)
    work.collectives[kind].count += times
    work.collectives[kind].bytes += times * size
    if count == 1 and kind != "collective-permute":
        return 0.0
    nodes = {rank // rates.node for rank in group}
    seconds = size * share / (rates.network if len(nodes) > 1 else rates.link) + rates.latency
    work.seconds["collectives"] += times * seconds
    return seconds


def _group(text: str, ranks: Sequence[int]) -> Sequence[int]:
    """Ranks of a collective's first group; ``ranks`` are those of the program's devices, () for 0, 1, and so on."""
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", text):
        group = [int(place) for place in pairs.groups()]
    elif re.search(r"replica_groups=(?!\{\})", text):
        group = replica_groups(text)[0]
    else:  # none are printed where all devices are one
        return ranks[:1] or (0,)
    return [ranks[place] for place in group] if ranks else group


# ---- arrays ----------------------------------------------------------------------------------------------------------


def pair_arrays(module: Module, tokens: int) -> list[Shape]:
    """Arrays with a dimension of a row's tokens twice or more: scores or masks of all pairs."""
    return [shape for shape in module.arrays if shape.dimensions.count(tokens) > 1]


def logit_arrays(module: Module, tokens: int, vocab: int) -> list[Shape]:
    """fp32 arrays of the logits of all tokens of a microbatch."""
    wide = (shape for shape in module.arrays if shape.dtype == "f32" and vocab in shape.dimensions)
    return [shape for shape in wide if shape.size == tokens * vocab]
