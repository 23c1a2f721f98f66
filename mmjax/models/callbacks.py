"""Callbacks: a user's functions before a module's layers, behind its end, and behind its projector.

They extend a module without parameters, for example by marks on tokens. An extension with parameters, or one that
changes shapes, is a module of the user's own. This module does not import JAX: a file of callbacks may also contain a
reader of data, and data processes do not import JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from mmjax.configurable import ConfigError

if TYPE_CHECKING:
    from jaxtyping import Array

    from mmjax.models.context import Context

Callback = Callable[["Context", "Array"], "Array"]
"""A pure function of the stage's context and of features, to features of the same shape and dtype."""
CalledAt = Literal["before", "after", "projected"]
"""The point at which a callback is called: a field of ``Callbacks``."""
F = TypeVar("F", bound=Callable[..., object])
_READS = "reads"


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Functions ``(context, x) -> x`` at three points of a module.

    They run inside the module's stages, on local rows, and may run again in backward. Rows are packed and padded, so
    array indices depend on the layout. ``context.tokens`` does not: it has the sample or medium of each position, and
    the position in it. Each of a projector's tokens stands for ``T / x.shape[1]`` neighbouring positions.

    Attributes:
      before: called with the features of ``Module.embed``, tokens of other modules included, before the first layer.
      after: called with the features behind the module's end, before its projector and its loss.
      projected: called with the output of the projector, which other modules read. The projector of a generator is at
        its start: then these are the projected tokens of other modules, one for each token of the medium, before they
        are split into patches and added to the features. A place without a token has the projection of zeros.
    """

    before: Callback | None = None
    after: Callback | None = None
    projected: Callback | None = None

    @property
    def by_place(self) -> dict[CalledAt, Callback]:
        """The callbacks that are set, by place: "before", "after" or "projected"."""
        return {place: callback for place in get_args(CalledAt) if (callback := getattr(self, place)) is not None}

    def inputs(self, places: Iterable[CalledAt]) -> tuple[str, ...]:
        """Host inputs that the callbacks at these places read, as ``reads`` declares them; () for places without a
        callback.
        """
        return tuple(name for place in places for name in getattr(getattr(self, place), _READS, ()))

    def apply(self, place: CalledAt, module: str, context: Context, x: Array) -> Array:
        """Calls the callback at a place ("before", "after" or "projected") and checks its result; without a callback
        returns ``x``.

        ``module`` is the module's name, for errors. The result has the shape and dtype of ``x``.

        Raises:
          ConfigError: the callback changes shape or dtype, or its result differs between ranks with the same tokens.
        """
        callback: Callback | None = getattr(self, place)
        if callback is None:
            return x
        import jax.numpy as jnp

        from mmjax import jax_compat

        y, setting = callback(context, x), f"{module}/Callbacks.{place}={name_of(callback)!r}"
        if (actual := _signature(y)) != (expected := _signature(x)):
            fix = "keep shape and dtype (y.astype(x.dtype)); what changes sizes is a module of your own"
            raise ConfigError(f"{setting}: gives {actual} for local rows {expected}; {fix}")
        y, axes = jnp.asarray(y), jax_compat.varying_axes(x)
        if extra_axes := sorted(jax_compat.varying_axes(y) - axes):
            raise ConfigError(
                f"{setting}: its result differs over {', '.join(extra_axes)}; sum it there (jax.lax.psum)"
            )
        return jax_compat.to_varying(y, sorted(axes))


NO_CALLBACKS = Callbacks()


def reads(*inputs: str) -> Callable[[F], F]:
    """A decorator that declares host inputs which a callback reads from ``context.inputs``: ``@reads("positions")``.

    A callback is a function (context, features) -> features. The inputs are sent to the callback's stage in addition to
    the inputs that the stage itself reads. The function itself is returned.
    """

    def declare(callback: F) -> F:
        setattr(callback, _READS, inputs)
        return callback

    return declare


def name_of(callback: Callback) -> str:
    """A callback's name as it is written in a setting: "module:function", such as "mine.steering:double"."""
    module, name = getattr(callback, "__module__", ""), getattr(callback, "__qualname__", repr(callback))
    return f"{module}:{name}"


def _signature(x: object) -> str:
    """Dtype and shape, such as ``float32[2, 16, 32]``."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    return type(x).__name__ if dtype is None or shape is None else f"{dtype}{list(shape)}"
