"""Callbacks: functions of a user's own before a module's layers, behind them, and behind its projector.

They are for what a module was not made for and needs no parameters, such as marks on tokens. What has parameters, or
changes shapes, is a module of one's own. Importing this imports no JAX: a file of callbacks may also hold a reader of
data, and data processes have none.
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
"""A pure function of a stage's surroundings and of features, to features of the same shape and dtype."""
CalledAt = Literal["before", "after", "projected"]
"""Where a callback stands: a field of ``Callbacks``."""
F = TypeVar("F", bound=Callable[..., object])
_READS = "reads"


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Functions ``(context, x) -> x`` at three places of a module.

    They run inside the module's stages, on local rows, and may run again in a backward. ``context.tokens`` says which
    sample or medium each position belongs to, and where in it it is; rows are packed and padded, so only this is the
    same under every layout. A projector's tokens stand for ``T / x.shape[1]`` positions each, one after another.

    Attributes:
      before: of the features that ``Module.embed`` makes, with what other modules give in them, before the first layer.
      after: of the features behind the module's end, before its projector and its loss.
      projected: of what its projector gives: tokens that other modules take. Where the projector starts the module, as
        a generator's does, these are the projected tokens of other modules, one for each token of the medium, before
        they are split into patches and added to the features; where no token is given, it is the projection of zeros.
    """

    before: Callback | None = None
    after: Callback | None = None
    projected: Callback | None = None

    @property
    def given(self) -> dict[CalledAt, Callback]:
        """The callbacks that there are, by place."""
        return {place: own for place in get_args(CalledAt) if (own := getattr(self, place)) is not None}

    def inputs(self, places: Iterable[CalledAt]) -> tuple[str, ...]:
        """Host inputs that the callbacks at these places read, as ``reads`` declares them."""
        return tuple(name for place in places for name in getattr(getattr(self, place), _READS, ()))

    def apply(self, place: CalledAt, module: str, context: Context, x: Array) -> Array:
        """Calls the callback at a place, and checks its result; ``x`` itself where there is none.

        Raises:
          ConfigError: it changes shape or dtype, or its result differs between ranks that hold the same tokens.
        """
        callback: Callback | None = getattr(self, place)
        if callback is None:
            return x
        import jax.numpy as jnp

        from mmjax import jax_compat

        y, named = callback(context, x), f"{module}/Callbacks.{place}={name_of(callback)!r}"
        if (found := _shown(y)) != (wanted := _shown(x)):
            fix = "keep shape and dtype (y.astype(x.dtype)); what changes sizes is a module of your own"
            raise ConfigError(f"{named}: gives {found} for local rows {wanted}; {fix}")
        y, axes = jnp.asarray(y), jax_compat.varying_axes(x)
        if more := sorted(jax_compat.varying_axes(y) - axes):
            raise ConfigError(f"{named}: its result differs over {', '.join(more)}; sum it there (jax.lax.psum)")
        return jax_compat.to_varying(y, sorted(axes))


NO_CALLBACKS = Callbacks()


def reads(*inputs: str) -> Callable[[F], F]:
    """Declares host inputs of a module that a callback reads from ``context.inputs``, such as ``@reads("positions")``.

    Beside those that the callback's stage reads anyway; they are sent to that stage too.
    """

    def declare(callback: F) -> F:
        setattr(callback, _READS, inputs)
        return callback

    return declare


def name_of(callback: Callback) -> str:
    """A callback's name, as a setting has it."""
    module, name = getattr(callback, "__module__", ""), getattr(callback, "__qualname__", repr(callback))
    return f"{module}:{name}"


def _shown(x: object) -> str:
    """Dtype and shape, such as ``float32[2, 16, 32]``."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    return type(x).__name__ if dtype is None or shape is None else f"{dtype}{list(shape)}"
