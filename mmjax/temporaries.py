"""Temporaries of a traced program, estimated by what a compiler for GPUs makes of it: kernels of fused operations.

A value has memory of its own only where a kernel ends: products, attention, collectives and loops read arrays and write
arrays. Elementwise operations, casts and broadcasts in between are parts of the kernels that read their results, and a
reduction is part of the kernel that makes what it adds up. What such a value is made of lives until it has been read.

Relies on JAX beyond its public, stable API, as ``jaxprs`` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

WORKSPACE = 32 * 2**20
"""Bytes that a GPU's products work with beside arguments and results: cuBLAS's workspace on a Hopper."""
_VIEWS = frozenset(
    {"reshape", "squeeze", "expand_dims", "pvary", "pcast", "copy", "copy_p", "stop_gradient", "name"}
    | {"optimization_barrier", "reduce_precision", "sharding_constraint"}
)
"""Operations whose results lie in the memory of their operands, the first in that of the first."""
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "shard_map"}) | frozenset(
    {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"}
)
_INTO_FIRST = frozenset({"scatter-add", "scatter", "scatter_add", "dynamic_update_slice"})
"""Operations whose result lies in the memory of the first operand, if nothing else reads that."""
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "reduce_prod"}
)
_LOOPS = frozenset({"scan", "while"})
_FUSED = frozenset(
    "abs add add_any and bitcast_convert_type broadcast_in_dim ceil clamp concatenate convert_element_type cos div "
    "dynamic_slice eq erf erf_inv erfc exp exp2 expm1 floor gather ge gt imag integer_pow iota is_finite le log log1p "
    "logistic lt max min mul ne neg nextafter not or pad population_count pow real rem rev round rsqrt select_n shift_"
    "left shift_right_arithmetic shift_right_logical sign sin slice split sqrt square sub tan tanh transpose xor "
    "random_bits random_wrap random_unwrap threefry2x32 axis_index".split()
)


@dataclass(eq=False)
class _Value:
    """An array of a program.

    Attributes:
      size: its bytes on a device.
      held: whether it needs no memory among the temporaries: an argument, a constant, or a result.
      made_at: number of the operation that makes it; -1 for arguments.
      readers: numbers of the operations that read it.
    """

    size: int = 0
    held: bool = False
    made_at: int = -1
    readers: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Operation:
    name: str
    inputs: list[_Value]
    outputs: list[_Value]
    inside: int = 0


def temporary_bytes(fn: Callable[..., Any], avals: Sequence[Any], workspace: int = 0) -> int:
    """Estimates the peak bytes of ``fn(*avals)`` on a device, beside its arguments and results.

    Operations that no result needs are left out, as compilers do. Inside a ``shard_map`` local shapes count.

    Args:
      fn: a traceable function.
      avals: its positional arguments, as trees of arrays or ``ShapeDtypeStruct``.
      workspace: bytes that are added for a program that has products, such as ``WORKSPACE``.
    """
    return of_jaxpr(jax.make_jaxpr(fn)(*avals).jaxpr, workspace)


def of_jaxpr(jaxpr: Any, workspace: int = 0) -> int:
    """``temporary_bytes`` of a jaxpr."""
    program = _Program(jaxpr)
    return program.peak() + workspace * program.has_products


class _Program:
    """The operations of a jaxpr without those that no result needs, calls taken apart."""

    def __init__(self, jaxpr: Any, sliced: Sequence[int] = ()):
        """``sliced``: numbers of the arguments that are slices of arrays, and no arrays themselves."""
        needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        self.operations: list[_Operation] = []
        self.has_products = False
        self._same: dict[_Value, _Value] = {}
        arguments = [_Value(_size(v.aval), held=i not in sliced) for i, v in enumerate(needed.invars)]
        self._virtual = {arguments[i] for i in sliced}
        self.results = self._inline(needed, arguments)
        self._drop_dead()

    def _inline(self, jaxpr: Any, arguments: Sequence[_Value]) -> list[_Value]:
        """Adds the operations of a jaxpr; returns its results."""
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        values |= {v: _Value(_size(v.aval), held=True) for v in jaxpr.constvars}

        def of(v: Any) -> _Value:
            return _Value(held=True) if isinstance(v, Literal) else values[v]

        for eqn in jaxpr.eqns:
            name, inputs = eqn.primitive.name, [of(v) for v in eqn.invars]
            bodies = list(inner_jaxprs(eqn))
            if name in _CALLS and bodies and len(bodies[0].invars) == len(inputs):
                values.update(zip(eqn.outvars, self._inline(bodies[0], inputs), strict=True))
                continue
            views = _view_outputs(eqn)
            if views:
                values.update(zip(eqn.outvars, inputs, strict=False))
                continue
            outputs = [_Value(_size(v.aval)) for v in eqn.outvars]
            self.operations.append(_Operation(name, inputs, outputs, self._inside(eqn, bodies)))
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [of(v) for v in jaxpr.outvars]

    def _inside(self, eqn: Any, bodies: Sequence[Any]) -> int:
        """Bytes that the bodies of an operation need, of which one runs at a time."""
        if eqn.primitive.name == "scan":
            constants, carried = _constants_and_carried(eqn.params)
            (body,) = bodies
            programs = [_Program(body, range(constants + carried, len(body.invars)))]
        else:
            programs = [_Program(body) for body in bodies]
        self.has_products |= any(program.has_products for program in programs)
        return max((program.peak() for program in programs), default=0)

    def _drop_dead(self) -> None:
        live, kept = set(self.results), list[_Operation]()
        for operation in reversed(self.operations):
            if not live.isdisjoint(operation.outputs):
                live.update(operation.inputs)
                kept.append(operation)
        self.operations = kept[::-1]
        self.has_products |= any(operation.name in _PRODUCTS for operation in self.operations)
        for number, operation in enumerate(self.operations):
            for value in operation.inputs:
                value.readers.append(number)
            for value in operation.outputs:
                value.made_at = number
        for value in self.results:
            value.held |= value not in self._virtual

    # ---- memory ------------------------------------------------------------------------------------------------------

    def peak(self) -> int:
        """Most bytes of temporaries at a time."""
        arrays = self._arrays()
        sources: dict[_Value, frozenset[_Value]] = {}

        def of(value: _Value) -> frozenset[_Value]:
            """The temporaries that have to be there for ``value`` to be read."""
            if value.held:
                return frozenset()
            return frozenset({value}) if value in arrays else sources.get(value, frozenset())

        last_read: dict[_Value, int] = {}
        for number, operation in enumerate(self.operations):
            read = frozenset[_Value]().union(*map(of, operation.inputs))
            last_read.update(dict.fromkeys(read, number))
            sources.update((value, read) for value in operation.outputs if not value.held and value not in arrays)
        merged = self._into(arrays, last_read)
        live, most = 0, 0
        ends: dict[int, int] = {}
        slices = {v for v in arrays if v.made_at < 0}
        for value in slices:
            value.made_at = min(value.readers)
        made: dict[int, list[_Value]] = {}
        for value in arrays:
            made.setdefault(value.made_at, []).append(value)
        for number, operation in enumerate(self.operations):
            for value in made.get(number, []):
                if value in merged:
                    continue
                live += value.size
                end = max(last_read.get(value, number), number)
                ends[end] = ends.get(end, 0) + value.size
            most = max(most, live + operation.inside)
            live -= ends.pop(number, 0)
        return most

    def _arrays(self) -> set[_Value]:
        """The values that have memory of their own among the temporaries."""
        reaches = self._reaches_a_kernel()
        arrays: set[_Value] = set()
        weights: dict[_Value, int] = {}  # bytes that have to be there for a fused value
        for value in self._virtual:
            if any(self.operations[reader].name not in _FUSED for reader in value.readers):
                arrays.add(value)
        for operation in self.operations:
            made_of = sum(
                value.size if value in arrays else 0 if value.held else weights.get(value, 0)
                for value in {*operation.inputs}
            )
            for value in operation.outputs:
                if value.held:
                    continue
                if operation.name not in _FUSED or self._is_array(value, made_of, reaches):
                    arrays.add(value)
                else:
                    weights[value] = made_of
        return arrays

    def _is_array(self, value: _Value, made_of: int, reaches: set[_Value]) -> bool:
        """Whether the result of a fused operation is written to memory."""
        names = [self.operations[reader].name for reader in value.readers]
        if any(name not in _FUSED and name not in _REDUCTIONS for name in names):
            return True
        return len(names) > 1 and value in reaches and made_of >= value.size

    def _reaches_a_kernel(self) -> set[_Value]:
        """The values of which a product, a collective or another kernel reads something that is made of them."""
        reaches: set[_Value] = set()
        for operation in reversed(self.operations):
            if operation.name not in _FUSED or not reaches.isdisjoint(operation.outputs):
                reaches.update(operation.inputs)
        return reaches

    def _into(self, arrays: set[_Value], last_read: dict[_Value, int]) -> set[_Value]:
        """The arrays that lie in the memory of a result or of another array.

        A product is written to where it is added to. Whatever is made of an array that is not read any more may
        overwrite it.
        """
        merged: set[_Value] = set()
        for number, operation in enumerate(self.operations):
            taken = None
            for output in operation.outputs:
                dying = [
                    value
                    for value in dict.fromkeys(operation.inputs)
                    if value in arrays and last_read.get(value) == number and value.size == output.size
                ]
                if operation.name in _FUSED or operation.name in _INTO_FIRST:
                    taken = next((value for value in dying if value not in merged), None)
                if taken is None or operation.name not in ("add", "add_any", *_INTO_FIRST) and output.held:
                    continue
                if output.held:
                    if self.operations[taken.made_at].name in _PRODUCTS or operation.name in _INTO_FIRST:
                        merged.add(taken)
                elif output in arrays:
                    last_read[taken] = max(last_read[taken], last_read.get(output, number))
                    merged.add(output)
        return merged


def _view_outputs(eqn: Any) -> bool:
    """Whether the results lie in the memory of the operands."""
    name = eqn.primitive.name
    if name in _VIEWS:
        return True
    if name == "broadcast_in_dim" or name == "transpose":
        return eqn.invars[0].aval.size == eqn.outvars[0].aval.size and name == "broadcast_in_dim"
    return name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype


def _size(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "dtype") and hasattr(aval, "shape") else 0


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def _constants_and_carried(scan: dict[str, Any]) -> tuple[int, int]:
    if "ft_in" not in scan:  # before jax 0.11
        return scan["num_consts"], scan["num_carry"]
    constants, carried, _ = scan["ft_in"].unpack()
    return len(constants), len(carried)
