"""SPMD functions over a mesh, and programs: such functions compiled for fixed shapes ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax import jax_compat, jaxprs, temporaries


@dataclass(frozen=True, eq=False)
class Spmd:
    """A per-device function with its mesh and specs; callable on global arrays, inside ``jit`` and outside.

    Attributes:
      body: function of local shards.
      mesh: devices that run it.
      in_specs, out_specs: pytree prefixes of ``PartitionSpec``.
      check_vma: track which values vary over which axes, so that transposition inserts the sums that it needs. Off
        only for data movement that is not differentiated.
    """

    body: Callable[..., Any]
    mesh: Mesh
    in_specs: Any
    out_specs: Any
    check_vma: bool = True

    def __call__(self, *args: Any) -> Any:
        """Runs ``body`` on the shards of global arrays; returns global arrays in the structure of its result."""
        return jax.shard_map(
            self.body, mesh=self.mesh, in_specs=self.in_specs, out_specs=self.out_specs, check_vma=self.check_vma
        )(*args)

    def abstract(self, *avals: Any) -> Any:
        """Global shapes, dtypes and shardings of the outputs, as ``ShapeDtypeStruct``, without running anything.

        ``avals`` are the arguments as global arrays or ``ShapeDtypeStruct``.
        """
        return with_sharding(jax.eval_shape(self, *avals), self.mesh, self.out_specs)


@dataclass(frozen=True, eq=False, kw_only=True)
class PretracedSpmd(Spmd):
    """An SPMD function with an existing trace, which is part of the trace of a larger function.

    Attributes:
      call: the function of global arrays, which reuses the trace; ``body`` is for traces over other axes.
    """

    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Runs ``call`` on global arrays; see ``Spmd.__call__``."""
        return self.call(*args)


def with_sharding(shapes: Any, mesh: Mesh, specs: Any) -> Any:
    """Attaches shardings on ``mesh`` to a tree of global shapes and dtypes; returns a tree of ``ShapeDtypeStruct``.

    ``specs`` are ``PartitionSpec`` in a prefix of that tree, such as one for all leaves.
    """

    def attach(spec: PartitionSpec, subtree: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), subtree)

    return jax.tree.map(attach, specs, shapes)


def zeros_of(aval: Any) -> jax.Array:
    """Zeros of the global shape, dtype and ``NamedSharding`` of a ``ShapeDtypeStruct``.

    Inside a program they are typed like an argument of that sharding.
    """
    local_shape, sharding = aval.sharding.shard_shape(aval.shape), aval.sharding
    return Spmd(lambda: jnp.zeros(local_shape, aval.dtype), sharding.mesh, (), sharding.spec)()


def to_devices(tree: Any, shardings: Any) -> Any:
    """Puts host arrays on devices; each process puts the shards on its own devices.

    Args:
      tree: numpy arrays of the global shapes, or numbers. If other processes have shards too, also objects with a
        ``shape`` that are indexed like arrays, only for this process's shards.
      shardings: a ``NamedSharding`` for every array, or one for all.

    Returns:
      The tree of global arrays.
    """
    if isinstance(tree, np.ndarray):
        return _put(tree, shardings)
    return jax.tree.map(_put, tree, _for_each(shardings, tree))


def _put(array: Any, sharding: NamedSharding) -> jax.Array:
    if not sharding.is_fully_addressable:
        return local_shards(array, sharding)
    is_narrow = isinstance(array, np.ndarray) and array.dtype.itemsize <= 4
    return jax_compat.host_array_on(array, sharding) if is_narrow else jax.device_put(array, sharding)


def local_shards(tree: Any, shardings: Any) -> Any:
    """Puts host arrays on devices shard by shard; for arrays with shards on devices of other processes, too.

    Args:
      tree: numpy arrays of the global shapes, numbers, or objects with a ``shape`` that are indexed like arrays, only
        for this process's shards.
      shardings: a ``NamedSharding`` for every array, or one for all.

    Returns:
      The tree of global arrays.
    """

    def put(array: Any, sharding: NamedSharding) -> jax.Array:
        array = array if hasattr(array, "shape") else np.asarray(array)  # it may hold only this process's shards
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, tree, _for_each(shardings, tree))


def _for_each(shardings: Any, tree: Any) -> Any:
    """A tree of shardings like ``tree``, from such a tree or from one sharding for every array."""
    return jax.tree.map(lambda _: shardings, tree) if isinstance(shardings, NamedSharding) else shardings


class Stitcher:
    """Joins the pieces on this process's devices into one array, without a copy.

    A device without a piece gets zeros, created once for each device. All pieces have one shape and dtype.
    """

    def __init__(self, piece: tuple[int, ...], dtype: Any):
        """For pieces of the shape ``piece`` and this dtype."""
        self._piece, self._dtype = piece, dtype
        self._zeros: dict[Any, jax.Array] = {}

    def __call__(self, pieces: Mapping[Any, jax.Array], shape: tuple[int, ...], sharding: Any) -> jax.Array:
        """The array of this global shape and sharding with ``pieces``, by device, as its shards."""
        shards = [pieces[d] if d in pieces else self.zeros(d) for d in jax_compat.local_devices(sharding)]
        return jax_compat.array_of_shards(shape, self._dtype, sharding, shards)

    def zeros(self, device: Any) -> jax.Array:
        """The zeros on a device of this process."""
        if device not in self._zeros:
            self._zeros[device] = jax.device_put(np.zeros(self._piece, self._dtype), device)
        return self._zeros[device]


def _platform(avals: Any) -> str:
    """Platform of the arrays' devices."""
    return next(iter(jax.tree.leaves(avals)[0].sharding.device_set)).platform


def has_local_devices(sharding: Any) -> bool:
    """Whether this process has a device of a ``jax.sharding.Sharding``."""
    me = jax_compat.process_index()
    return any(device.process_index == me for device in sharding.device_set)


def remote_array(aval: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of this shape, dtype and sharding, whose shards must all be on other processes' devices."""
    return jax.make_array_from_single_device_arrays(aval.shape, aval.sharding, [], dtype=aval.dtype)


def by_device(array: jax.Array) -> dict[Any, jax.Array]:
    """This process's shards of an array, as separate arrays, by ``jax.Device``; {} if it has none."""
    return jax_compat.shards_by_device(array)


class Program:
    """A function compiled ahead of time for fixed argument shapes and shardings.

    Attributes:
      name: shown in progress and errors.
      avals: arguments, as ``ShapeDtypeStruct`` with shardings.
      outputs: results, likewise.
      donated: numbers of the arguments whose buffers a call may reuse.
      compiling: names of the programs that this process is compiling at the moment.
      newest_end: an empty array that is ready on each device when the program that was dispatched last has ended.
      dispatches: how many programs this process has dispatched.
    """

    compiling: ClassVar[set[str]] = set()
    newest_end: ClassVar[jax.Array | None] = None
    dispatches: ClassVar[int] = 0

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        avals: Sequence[Any],
        outputs: Any,
        donate: Sequence[int] = (),
        out_shardings: Any = None,
    ):
        """Neither traces nor compiles.

        Args:
          name: shown in progress and errors.
          fn: the function of global arrays.
          avals: its positional arguments, as trees of ``ShapeDtypeStruct`` with shardings.
          outputs: its result, likewise.
          donate: numbers of the arguments whose buffers a call may reuse.
          out_shardings: shardings of the result, as for ``jax.jit``; ``None`` leaves them to JAX.
        """
        self.name, self.avals, self.outputs, self.donated = name, tuple(avals), outputs, tuple(donate)
        self._fn, options = fn, jax_compat.compiler_options(_platform(self.avals))

        # The empty array costs no memory, and waiting for it keeps no result alive.
        def with_end(*args: Any) -> Any:
            return fn(*args), jnp.zeros((0,), bool)

        pinned = (out_shardings, None)
        self._jitted = jax.jit(with_end, donate_argnums=self.donated, out_shardings=pinned, compiler_options=options)
        self._lowered: Any = None
        self._compiled: Any = None

    @classmethod
    def of(cls, name: str, fn: Spmd, avals: Sequence[Any], donate: Sequence[int] = ()) -> Program:
        """A program of one SPMD function; its outputs are ``fn.abstract(*avals)``. Arguments as for ``__init__``."""
        return cls(name, fn, avals, fn.abstract(*avals), donate)

    @property
    def local(self) -> bool:
        """Whether this process has a device that runs it."""
        return any(has_local_devices(sharding) for sharding in {aval.sharding for aval in jax.tree.leaves(self.avals)})

    @property
    def is_compiled(self) -> bool:
        """Whether it has been compiled."""
        return self._compiled is not None

    @property
    def compiled(self) -> Any:
        """The compiled executable, a ``jax.stages.Compiled``; compiles at its first use unless ``compile`` has."""
        self.compile()
        return self._compiled

    def temporary_bytes(self) -> int:
        """Bytes that it needs on a device while it runs, beside arguments and results: an estimate from its trace."""
        # Of the function and not of the program: inside a trace no compiler takes options.
        return temporaries.temporary_bytes(self._fn, self.avals)

    def reads(self) -> list[bool]:
        """For each array of the arguments, in order, whether a result depends on it; JAX leaves out the others."""
        return jaxprs.used_inputs(self._fn, self.avals)

    def compiled_temporary_bytes(self) -> int:
        """Bytes that it needs on a device while it runs, beside arguments and results, as the compiler plans them."""
        return int(self.compiled.memory_analysis().temp_size_in_bytes)

    def lowered_text(self) -> str:
        """The compiler's input, StableHLO; equal for programs that differ only in their devices."""
        return self._lower().as_text()

    def compiled_with(self, options: Mapping[str, Any]) -> Any:
        """A separate executable with other compiler options, by XLA's names; ``compiled`` stays as it is."""
        return self._lower().compile(dict(options))

    def lower(self) -> None:
        """Traces and lowers the function, once (holds Python's lock, so this part does not run in parallel)."""
        if self._lowered is None and self._compiled is None:
            self._lowered = self._jitted.lower(*self.avals)

    def _lower(self) -> Any:
        """The lowered function. It is not kept once it is compiled, and then lowered again."""
        return self._jitted.lower(*self.avals) if self._lowered is None else self._lowered

    def compile(self) -> None:
        """Compiles, once; XLA releases Python's lock, so several programs compile side by side in threads."""
        if self._compiled is None:
            Program.compiling.add(self.name)
            try:
                self.lower()
                self._compiled = self._lowered.compile()
            finally:
                Program.compiling.discard(self.name)
            self._lowered = None

    def __call__(self, *args: Any) -> Any:
        """Dispatches the program and returns the results at once, before they are ready.

        Compiles first if need be. ``args`` have the structure, shapes, dtypes and shardings of ``avals``; donated ones
        must not be used afterwards.
        """
        result, Program.newest_end = (self._compiled or self.compiled)(*args)
        Program.dispatches += 1
        return result
