"""Facts about traced functions from their jaxprs: inputs that results depend on, and dead code.

Relies on JAX beyond its public, stable API, as ``jax_compat`` does.

Everything here has a test in ``tests/test_jaxprs.py`` that fails when JAX changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval


def used_inputs(
    fn: Callable[..., Any], avals: Sequence[Any], outputs: Callable[[Any], Any] | None = None
) -> list[bool]:
    """For each leaf of ``avals``: whether any selected output of ``fn(*avals)`` depends on it.

    Args:
      fn: a traceable function.
      avals: its positional arguments as trees of arrays or ``ShapeDtypeStruct``.
      outputs: maps the output structure to booleans (selected or not) of the same structure; all when ``None``.
    """
    jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*avals)
    selected = jax.tree.map(lambda _: True, shape) if outputs is None else outputs(shape)
    return _live(jaxpr.jaxpr, jax.tree.leaves(selected))


def without_dead_code(fn: Callable[..., Sequence[jax.Array]], *args: Any) -> list[jax.Array]:
    """Calls ``fn(*args)`` without operations that no result needs; compilers keep some of them, such as collectives.

    Args:
      fn: a traceable function that returns a flat sequence of arrays.
      *args: its arguments, trees of arrays.

    Returns:
      The results of ``fn``, all of them.
    """
    traced = jax.make_jaxpr(fn)(*args)
    needed, used = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    inputs = [x for x, is_used in zip(jax.tree.leaves(args), used, strict=True) if is_used]
    return jaxpr_as_fun(ClosedJaxpr(needed, traced.consts))(*inputs)


def dependencies(fn: Callable[..., Any], avals: Sequence[Any]) -> list[list[bool]]:
    """For each output leaf of ``fn(*avals)`` a list that has, for each input leaf, whether the output depends on it.

    ``avals`` are the positional arguments, as trees of arrays or ``ShapeDtypeStruct``. Looks into calls, ``shard_map``
    bodies and scans. A result of any other operation counts as dependent on all operands.
    """
    jaxpr = jax.make_jaxpr(fn)(*avals).jaxpr
    inputs = range(len(jaxpr.invars))
    return [[bool(sources >> i & 1) for i in inputs] for sources in _sources(jaxpr, [1 << i for i in inputs])]


def _sources(jaxpr: Any, input_sources: Sequence[int]) -> list[int]:
    """For each output of a jaxpr, the original inputs that it depends on, as bits; likewise for each of its inputs."""
    sources_of = dict(zip(jaxpr.invars, input_sources, strict=True))

    def of(v: Any) -> int:
        return 0 if isinstance(v, Literal) else sources_of.get(v, 0)

    for eqn in jaxpr.eqns:
        sources, bodies = [of(v) for v in eqn.invars], list(inner_jaxprs(eqn))
        if [(len(body.invars), len(body.outvars)) for body in bodies] != [(len(eqn.invars), len(eqn.outvars))]:
            results = [reduce(or_, sources, 0)] * len(eqn.outvars)
        elif eqn.primitive.name == "scan":
            results = _sources_of_scan(eqn, bodies.pop(), sources)
        else:
            results = _sources(bodies.pop(), sources)
        sources_of |= zip(eqn.outvars, results, strict=True)
    return [of(v) for v in jaxpr.outvars]


def _sources_of_scan(eqn: Any, body: Any, input_sources: Sequence[int]) -> list[int]:
    """``_sources`` of a scan: repeats the body until the carried values depend on no further inputs."""
    sources, first, carried = list(input_sources), *constants_and_carried(eqn.params)
    while True:
        results = _sources(body, sources)
        before = sources[first : first + carried]
        after = [*map(or_, before, results)]  # the first results are the carried values
        if after == before:
            return results
        sources[first : first + carried] = after


def constants_and_carried(scan: dict[str, Any]) -> tuple[int, int]:
    """Numbers of constants and of carried values, the first operands of a scan."""
    if "ft_in" not in scan:  # before jax 0.11
        return scan["num_consts"], scan["num_carry"]
    constants, carried, _ = scan["ft_in"].unpack()
    return len(constants), len(carried)


def _live(jaxpr: Any, selected: list[bool]) -> list[bool]:
    """For each input: whether any selected output depends on it."""
    from jax._src.interpreters import partial_eval

    return list(partial_eval.dce_jaxpr(jaxpr, selected)[1])


def named_reads(
    fn: Callable[..., Any], avals: Sequence[Any], names: Collection[str]
) -> dict[str, list[tuple[int, int]]]:
    """Counts, by name and for each leaf of ``avals``, reads under ``checkpoint_name`` with the name, and other reads.

    ``avals`` are the positional arguments of ``fn``, as trees of arrays or ``ShapeDtypeStruct``. A leaf that is a
    result of ``fn`` has another read for that. Looks into calls, checkpointed and ``shard_map`` bodies, and scans. In a
    scan, a scanned input counts as one read, and a constant as one read per iteration. A transpose or a change of
    varying axes is no read, but reads of its result are.
    """
    jaxpr = jax.make_jaxpr(fn)(*avals).jaxpr
    return {name: _reads(jaxpr, name) for name in names}


_ALIASES = frozenset({"pvary", "pcast", "transpose"})


def _reads(jaxpr: Any, name: str) -> list[tuple[int, int]]:
    reads: dict[Any, tuple[int, int]] = {}

    def add(v: Any, named: int, unnamed: int) -> None:
        if not isinstance(v, Literal):
            before = reads.get(v, (0, 0))
            reads[v] = (before[0] + named, before[1] + unnamed)

    for v in jaxpr.outvars:
        add(v, 0, 1)
    for eqn in reversed(jaxpr.eqns):
        primitive, counts = eqn.primitive.name, [(0, 1)] * len(eqn.invars)
        if primitive == "name" and eqn.params["name"] == name:
            counts = [(1, 0)]
        elif primitive in _ALIASES:
            counts = [reads.get(v, (0, 0)) for v in eqn.outvars]
        elif not primitive.startswith("custom_"):
            bodies = list(inner_jaxprs(eqn))
            if [len(body.invars) for body in bodies] == [len(eqn.invars)]:
                counts = _reads(bodies.pop(), name)
                if primitive == "scan":
                    constants, turns = constants_and_carried(eqn.params)[0], eqn.params["length"]
                    counts[:constants] = [(named * turns, unnamed * turns) for named, unnamed in counts[:constants]]
        for v, count in zip(eqn.invars, counts, strict=True):
            add(v, *count)
    return [reads.get(v, (0, 0)) for v in jaxpr.invars]


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation, such as the body of a loop."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner
