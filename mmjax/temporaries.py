"""An estimate of a traced program's temporaries, for kernels as XLA fuses them on GPUs.

A value has memory of its own only where a kernel begins or ends: products, attention, collectives and loops read and
write arrays. Elementwise operations, casts and broadcasts in between are parts of the kernels that read their results,
and a reduction is the end of the kernel that makes what it adds up. What such a value is made of is kept until then.

A product is written to where it is added to. What is made of an array that is not read any more lies in its memory, and
a result has room for others until it is written. Nothing is reordered: XLA's order of layers is that of the trace.

Relies on JAX beyond its public, stable API, as ``jaxprs`` does.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from mmjax import jaxprs

WORKSPACE = 32 * 2**20
"""Bytes that products on a GPU work with beside arguments and results: cuBLAS's workspace since the H100."""
_CALLS = frozenset({
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "shard_map", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr",
})  # fmt: skip
"""Operations that are their bodies."""
_VIEWS = frozenset({
    "reshape", "squeeze", "expand_dims", "transpose", "pvary", "pcast", "copy", "copy_p", "stop_gradient", "name",
    "optimization_barrier", "sharding_constraint",
})  # fmt: skip
"""Operations whose results lie in the memory of their operands. Products read a transposed array as it is."""
_FUSED = frozenset({
    "abs", "add", "add_any", "and", "axis_index", "bitcast_convert_type", "broadcast_in_dim", "ceil", "clamp",
    "concatenate", "convert_element_type", "cos", "div", "dynamic_slice", "eq", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "gather", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad", "pow", "reduce_precision", "rem", "rev",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "slice",
    "split", "sqrt", "square", "sub", "tan", "tanh", "xor",
})  # fmt: skip
"""Operations that are part of the kernels that read their results; whatever is not named here is a kernel."""
_REDUCTIONS = frozenset({
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin",
})  # fmt: skip
"""Operations whose operands are computed by their own kernels."""
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_SUMS = frozenset({"add", "add_any"})
_WRITES = frozenset({"scatter-add", "scatter", "dynamic_update_slice"})
"""Operations whose result lies in the memory of the first operand, if nothing else reads that."""


@dataclass(eq=False)
class _Value:
    """An array of a program.

    Attributes:
      size: its bytes on a device.
      counted: whether it could be a temporary: it is no argument, constant or result.
      made_at: number of the operation that makes it; -1 for arguments.
      readers: numbers of the operations that read it.
    """

    size: int = 0
    counted: bool = True
    made_at: int = -1
    readers: list[int] = field(default_factory=list)


_Span = tuple[int, int, int]
"""Numbers of the first and the last operation that need an array, and its bytes."""


@dataclass(eq=False)
class _Operation:
    """An operation: its name, values, and bytes that its bodies need."""

    name: str
    inputs: list[_Value]
    outputs: list[_Value]
    inside: int = 0


def temporary_bytes(fn: Callable[..., Any], avals: Sequence[Any]) -> int:
    """Estimates the peak bytes of ``fn(*avals)`` on a device, beside its arguments and results.

    Operations that no result needs are left out, as compilers do. Inside a ``shard_map`` local shapes count. A loop
    counts as its body once, a conditional as its larger branch.

    Args:
      fn: a traceable function.
      avals: its positional arguments, as trees of arrays or ``ShapeDtypeStruct``; for those on GPUs, ``WORKSPACE`` is
        added to a program with products.
    """
    program = _Program(jax.make_jaxpr(fn)(*avals).jaxpr)
    return program.peak() + (WORKSPACE if program.has_products and _on_gpus(avals) else 0)


class _Program:
    """The operations of a jaxpr that its results need, in order, with calls replaced by their bodies.

    Attributes:
      operations: the operations.
      results: values that are its results.
      slices: arguments that are slices of arrays, and no arrays themselves.
      has_products: whether it has products.
    """

    def __init__(self, jaxpr: Any, sliced: Collection[int] = ()):
        """``sliced``: numbers of the arguments that are slices of arrays."""
        needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        self.operations: list[_Operation] = []
        self.has_products = False
        arguments = [_Value(_size(v.aval), counted=i in sliced) for i, v in enumerate(needed.invars)]
        self.slices = {value for value in arguments if value.counted}
        self.results = self._inline(needed, arguments)
        self._drop_dead()

    def _inline(self, jaxpr: Any, arguments: Sequence[_Value]) -> list[_Value]:
        """Adds the operations of a jaxpr; returns its results."""
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        values |= {v: _Value(counted=False) for v in jaxpr.constvars}

        def of(v: Any) -> _Value:
            return _Value(counted=False) if isinstance(v, Literal) else values[v]

        for eqn in jaxpr.eqns:
            inputs, bodies = [of(v) for v in eqn.invars], list(jaxprs.inner_jaxprs(eqn))
            if eqn.primitive.name in _CALLS and bodies and len(bodies[0].invars) == len(inputs):
                outputs = self._inline(bodies[0], inputs)
            elif _is_view(eqn):
                outputs = inputs[: len(eqn.outvars)]
            else:
                outputs = [_Value(_size(v.aval)) for v in eqn.outvars]
                inside = self._inside(eqn, bodies)
                self.operations.append(_Operation(eqn.primitive.name, inputs, outputs, inside))
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [of(v) for v in jaxpr.outvars]

    def _inside(self, eqn: Any, bodies: Sequence[Any]) -> int:
        """Most bytes that a body of an operation needs; one runs at a time."""
        sliced: Collection[int] = ()
        if eqn.primitive.name == "scan":
            sliced = range(sum(jaxprs.constants_and_carried(eqn.params)), len(eqn.invars))
        programs = [_Program(body, sliced) for body in bodies]
        self.has_products |= any(program.has_products for program in programs)
        return max((program.peak() for program in programs), default=0)

    def _drop_dead(self) -> None:
        live, reversed_operations = set(self.results), list[_Operation]()
        for operation in reversed(self.operations):
            if not live.isdisjoint(operation.outputs):
                live.update(operation.inputs)
                reversed_operations.append(operation)
        self.operations = reversed_operations[::-1]
        self.has_products |= any(operation.name in _PRODUCTS for operation in self.operations)
        for number, operation in enumerate(self.operations):
            for value in operation.inputs:
                value.readers.append(number)
            for value in operation.outputs:
                value.made_at = number
        for value in set(self.results) - self.slices:
            value.counted = False

    # ---- memory ------------------------------------------------------------------------------------------------------

    def peak(self) -> int:
        """Most bytes of temporaries at a time."""
        arrays = self._arrays()
        last_read = self._last_reads(arrays)
        started: dict[int, int] = defaultdict(int)
        ended: dict[int, int] = defaultdict(int)
        spans = [
            (start, last_read.get(value, start), value.size)
            for value in arrays - self._overwriting(arrays, last_read)
            for start in [value.readers[0] if value in self.slices else value.made_at]
        ]
        for start, end, size in self._outside_of_results(spans):
            started[start] += size
            ended[end] += size
        live, most = 0, 0
        for number, operation in enumerate(self.operations):
            live += started[number]
            most = max(most, live + operation.inside)
            live -= ended[number]
        return most

    def _outside_of_results(self, spans: Sequence[_Span]) -> Iterator[_Span]:
        """The arrays that lie in no result: one that is written later has room for those that are not read any more.

        Results that are made of an argument of their size lie in that.
        """
        rooms = [
            [value.size, value.made_at, 0]
            for value in {*self.results}
            if value.made_at >= 0 and not self._in_argument(value)
        ]
        rooms.sort()
        for start, end, size in sorted(spans):
            room = next((room for room in rooms if room[0] >= size and room[1] > end and room[2] <= start), None)
            if room is None:
                yield start, end, size
            else:
                room[2] = end + 1

    def _in_argument(self, result: _Value) -> bool:
        """Whether a result is an argument of its size and something, as the new sum of gradients is."""
        operation = self.operations[result.made_at]
        return operation.name in _SUMS and any(v.made_at < 0 and v.size == result.size for v in operation.inputs)

    def _arrays(self) -> set[_Value]:
        """The temporaries that have memory of their own."""
        kernels = self._read_by_kernels()
        arrays = {value for value in self.slices if any(self._name(reader) not in _FUSED for reader in value.readers)}
        made_of = Counter[_Value]()  # bytes of arrays from which a fused value is computed
        for operation in self.operations:
            inputs = {value for value in operation.inputs if value.counted}
            size = sum(value.size if value in arrays else made_of[value] for value in inputs)
            for value in (value for value in operation.outputs if value.counted):
                if operation.name not in _FUSED or self._is_written(value, size, kernels):
                    arrays.add(value)
                else:
                    made_of[value] = size
        return arrays

    def _name(self, number: int) -> str:
        return self.operations[number].name

    def _is_written(self, value: _Value, made_of: int, kernels: set[_Value]) -> bool:
        """Whether the result of a fused operation is an array.

        It is if a kernel reads it. It also is if several operations read it, a kernel reads one of their results, and
        it is no larger than the arrays that it is computed from.
        """
        names = [self._name(reader) for reader in value.readers]
        if any(name not in _FUSED and name not in _REDUCTIONS for name in names):
            return True
        return len(names) > 1 and value in kernels and made_of >= value.size

    def _read_by_kernels(self) -> set[_Value]:
        """The values that some kernel reads, or something that is made of them."""
        read: set[_Value] = set()
        for operation in reversed(self.operations):
            if operation.name not in _FUSED or not read.isdisjoint(operation.outputs):
                read.update(operation.inputs)
        return read

    def _last_reads(self, arrays: set[_Value]) -> dict[_Value, int]:
        """The number of the last operation that needs each array, or something that is computed from it."""
        last_read: dict[_Value, int] = {}
        sources: dict[_Value, frozenset[_Value]] = {value: frozenset({value}) for value in arrays}
        for number, operation in enumerate(self.operations):
            needed = frozenset[_Value]().union(*(sources.get(value, ()) for value in operation.inputs))
            last_read.update(dict.fromkeys(needed, number))
            sources.update((v, needed) for v in operation.outputs if v.counted and v not in arrays)
        return last_read

    def _overwriting(self, arrays: set[_Value], last_read: dict[_Value, int]) -> set[_Value]:
        """The arrays that lie in the memory of another one, whose ``last_read`` is then theirs, or of a result."""
        owners: dict[_Value, _Value] = {}  # the array in whose memory another one lies
        in_results: set[_Value] = set()
        for number, operation in enumerate(self.operations):
            if operation.name not in _FUSED | _WRITES:
                continue
            output = operation.outputs[0]
            over = next((v for v in operation.inputs if self._ends_in(v, output, number, arrays, last_read)), None)
            if over is None:
                continue
            owner = owners.get(over, over)
            if output in arrays:
                last_read[owner] = last_read.get(output, number)
                owners[output] = owner
            elif not output.counted and (self._is_added(operation, over) or not self._in_argument(output)):
                in_results.add(owner)
        return {*owners, *in_results}

    def _ends_in(
        self, value: _Value, output: _Value, number: int, arrays: set[_Value], last_read: dict[_Value, int]
    ) -> bool:
        """Whether operation ``number`` is the last to read an array of the size of its output."""
        return value in arrays and last_read.get(value) == number and value.size == output.size

    def _is_added(self, operation: _Operation, value: _Value) -> bool:
        """Whether an operation adds a product to something."""
        return operation.name in _SUMS and value.made_at >= 0 and self._name(value.made_at) in _PRODUCTS


def _on_gpus(avals: Sequence[Any]) -> bool:
    shardings = [getattr(aval, "sharding", None) for aval in jax.tree.leaves(avals)[:1]]
    return any(device.platform == "gpu" for sharding in shardings if sharding for device in sharding.device_set)


def _is_view(eqn: Any) -> bool:
    """Whether the results lie in the memory of the operands."""
    name = eqn.primitive.name
    if name in ("broadcast_in_dim", "pad"):  # adds dimensions of one, or nothing
        return eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    if name == "convert_element_type":
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    return name in _VIEWS


def _size(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "dtype") else 0
