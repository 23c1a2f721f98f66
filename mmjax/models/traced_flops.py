"""FLOPs of a module, counted in a trace of its layers.

A row is traced once per module, of a module with canvases three, on a device that need not exist. A loop of the
module's own counts as one turn.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import PartitionSpec
from jaxtyping import Int

from mmjax.attention.language import WORDS
from mmjax.attention.mask import Mask
from mmjax.data.patches import input_dtype, patch_shapes
from mmjax.jax_compat import PlannedDevice
from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.models.context import Context, SharedKeys
from mmjax.models.layers import LAYER_INPUT
from mmjax.models.parameters import Create, declarations
from mmjax.models.recorded_work import RecordedWork, recording

TOKENS = 16
"""LLM tokens, or tokens of text, of the row that is traced."""


@dataclass(frozen=True, kw_only=True)
class TracedWork:
    """FLOPs of a module in layers, and outside of them.

    Attributes:
      ends: of products outside of layers, for one position of a row.
      layers: of products in all layers, for one position.
      per_pair: of attention in all layers, for a pair of query and visible key, by mask.
      axes: of positions.
      special: positions of a segment that its length does not count, such as a class token.
      once: of products that are computed once for a segment, such as shifts by a picture's time.
      per_square: for each pair of places of a segment, where masks see none of them: of attention on a canvas's levels.
    """

    ends: Fraction
    layers: Fraction
    per_pair: Mapping[Mask, int]
    axes: int
    special: int
    once: Fraction = Fraction(0)
    per_square: Fraction = Fraction(0)

    def flops(self, lengths: Iterable[int], pairs: Mapping[Mask, int] | None = None) -> int:
        """Forward FLOPs over segments of these lengths, in positions.

        Args:
          lengths: lengths of the segments, without special positions.
          pairs: the number of pairs in one layer, by mask. By default it follows from the lengths: masks of words count
            as causal, and windows over positions of several axes are left out.
        """
        lengths_N = np.fromiter(map(int, lengths), np.int64)
        runs_N = lengths_N + self.special
        visible = pairs or {mask: _pairs(mask, runs_N, self.axes) for mask in self.per_pair}
        attention = sum(flops * visible[mask] for mask, flops in self.per_pair.items())
        once = self.once * int(np.count_nonzero(lengths_N)) + self.per_square * int((lengths_N**2).sum())
        return round(self.ends * int(lengths_N.sum()) + self.layers * int(runs_N.sum()) + once) + attention


@functools.lru_cache(maxsize=64)
def traced_work(module: Any) -> TracedWork:
    """The work of a ``Module``, whose settings are hashable; traces one row of ``TOKENS`` tokens.

    ``module`` is such as ``module_of(DecoderConfig(vocab=64))``. ``flops(lengths)`` of the result gives forward FLOPs
    for segments of these lengths.

    A language model's logits count for every token.
    """
    spec, positions = module.medium, _positions(module)
    if spec and spec.canvases:
        sides = [number * spec.multiple for number in (1, 2, 3)]
        squares = replace(module.config, canvases=tuple(zip(sides, sides, strict=True)))
        return _canvas_work(replace(module, config=squares))
    row = _traced_row(module, positions)
    special = spec.special if spec else 0
    work = TracedWork(
        ends=Fraction(row.ends, positions),
        layers=Fraction(row.layers, positions),
        per_pair=dict(row.per_pair),
        axes=_axes(module),
        special=special,
    )
    if not (spec and spec.queries):
        return work
    longer = _traced_row(module, positions + TOKENS)  # by what it has more, products for each position are told apart
    ends, layers = Fraction(longer.ends - row.ends, TOKENS), Fraction(longer.layers - row.layers, TOKENS)
    once = row.ends + row.layers - ends * (positions - special) - layers * positions
    return replace(work, ends=ends, layers=layers, once=once)


@functools.lru_cache(maxsize=64)
def _canvas_work(module: Any) -> TracedWork:
    """The work of a module whose rows are canvases, from traces of its own three, which are squares.

    It is a polynomial of degree 2 in a picture's places: levels have a share of them, and attention is of pairs.
    """
    places = [math.prod(sides) for sides in module.medium.canvases]
    rows = [_traced_row(module, module.medium.queries + number) for number in places]
    (first, second, third), (x, y, z) = places, [Fraction(row.ends + row.layers) for row in rows]
    slope = (y - x) / (second - first)
    per_square = ((z - x) / (third - first) - slope) / (third - second)
    per_place = slope - per_square * (first + second)
    return TracedWork(
        ends=Fraction(0),
        layers=per_place,
        per_pair=dict(rows[0].per_pair),
        axes=_axes(module),
        special=0,
        once=x - per_place * first - per_square * first**2,
        per_square=per_square,
    )


@dataclass(frozen=True, kw_only=True)
class _TracedRow:
    """FLOPs of products of a row, outside of layers and in them, and of attention for each pair, by mask."""

    ends: int
    layers: int
    per_pair: Counter[Mask]


def _traced_row(module: Any, positions: int) -> _TracedRow:
    inputs, parts = _row(module, positions), _single_parts(module)
    shapes: dict[str, tuple[int, ...]] = {}
    features = jax.ShapeDtypeStruct((1, positions, module.config.width), jnp.float32)
    record = record_shapes(functools.partial(_run_ends, module, shapes), inputs, parts, features)
    features = jax.ShapeDtypeStruct(shapes["first"], jnp.float32)
    layers, per_pair = 0, record.per_pair
    shared: dict[str, list[jax.ShapeDtypeStruct]] = {}
    for group in module.groups:
        mask, layer = group.mask(module.mask), parameter_shapes(group.create)
        if module.layer_input_width:
            layer[LAYER_INPUT] = jax.ShapeDtypeStruct((1, positions, module.layer_input_width), jnp.float32)
        run = functools.partial(_run_layer, group, mask, shared)
        work = record_shapes(run, inputs, layer, features)
        layers += group.layers * work.products
        per_pair += Counter({mask: group.layers * flops for mask, flops in work.per_pair.items()})
    last = jax.ShapeDtypeStruct(shapes["last"], jnp.float32)
    ends = record.products + (_head(module, inputs, parts, last) if module.losses else 0)
    return _TracedRow(ends=ends, layers=layers, per_pair=per_pair)


def _head(module: Any, inputs: Mapping[str, Any], parts: Any, features: Any) -> int:
    """FLOPs of the products with which a module gives its losses, from the features behind its end.

    A language model's losses go through its logits in chunks of tokens, so the logits of one token are traced.
    """
    if not module.gives_logits:
        return record_shapes(lambda context, p, x: module.loss(p, context, x), inputs, parts, features).products
    token = jax.ShapeDtypeStruct((1, 1, module.config.width), jnp.float32)
    of_token = record_shapes(lambda context, p, x: module.logits(p, context, x), inputs, parts, token)
    return features.shape[1] * of_token.products


def _pairs(mask: Mask, lengths_N: Int[np.ndarray, " N"], axes: int) -> int:
    """The number of pairs in segments of text, or of media, whose places along ``axes`` are not known."""
    runs_N = lengths_N
    if mask.grid_window and axes == 1:  # chunks
        whole_N = runs_N // mask.grid_window
        runs_N = np.append(np.repeat(mask.grid_window, whole_N.sum()), runs_N % mask.grid_window)
    if mask.kind == "full":
        return int(np.sum(runs_N**2))
    width_N = np.minimum(runs_N, mask.window or runs_N)
    return int(np.sum(width_N * (width_N + 1) // 2 + (runs_N - width_N) * width_N))


def _run_ends(module: Any, shapes: dict[str, tuple[int, ...]], context: Context, p: Any, x: jax.Array) -> Any:
    """The computations of a module before its first layer and behind its last; ``shapes`` gets those of their results,
    "first" and "last".
    """
    del x
    x = module.embed(p, context)
    if module.layer_input_width:
        module.layer_inputs(p, context, x)
    y = module.end(p, context, x)
    shapes |= {"first": x.shape, "last": y.shape}
    return y


def _run_layer(
    group: Any, mask: Mask, shared: dict[str, list[jax.ShapeDtypeStruct]], context: Context, p: Any, x: jax.Array
) -> Any:
    """A layer of a ``LayerGroup``; ``shared`` has the shapes of keys and values that layers before have stored."""
    stored, read = list[SharedKeys](), shared.get(group.reads, ())
    context = replace(context.under(mask), stored=stored)
    if read:
        k, v = (jnp.zeros(like.shape, like.dtype) for like in read)
        context = replace(context, shared=SharedKeys(k, v))
    y = group.block(context, x)(x, p)
    if group.stores:
        shared[group.stores] = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (stored[0].k, stored[0].v)]
    return y


def _single_parts(module: Any) -> dict[str, Any]:
    """The parameters outside of layers, and those of a layer, which ``embed`` may look at, nested dicts of shapes."""
    tree: dict[str, Any] = {"layers": parameter_shapes(module.groups[0].create)}
    for part in module.parts(first=True, last=True):
        leaves = parameter_shapes(part.create)
        tree |= {part.name: leaves} if part.name else leaves
    return tree


def parameter_shapes(create: Create) -> dict[str, Any]:
    """A nested dict of fp32 arrays' shapes, of the parameters that ``create`` creates."""
    flat = {path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for path, leaf in declarations(create).items()}
    return traverse_util.unflatten_dict(flat, sep="/")


def _axes(module: Any) -> int:
    """The number of axes of positions in the module's rows."""
    spec = module.medium
    return spec.position_axes if spec and not spec.codes else module.position_axes


def _positions(module: Any) -> int:
    """Positions of the row that is traced."""
    spec = module.medium
    if not (spec and spec.queries):
        return TOKENS * module.patches_per_token
    return spec.queries + TOKENS


def _row(module: Any, positions: int) -> dict[str, Any]:
    """Shapes of the host inputs of a row; an input that is unknown here is one number for each position."""
    spec = module.medium
    patches = positions - spec.queries if spec else positions
    shapes = patch_shapes(spec) if spec else {}
    axes = _axes(module)
    shapes["positions"] = (axes,) if axes > 1 or (spec and not spec.codes) else ()
    names = dict.fromkeys((*module.inputs(first=True, last=True), "segments", "positions"))
    dtypes: dict[str, Any] = {name: input_dtype(name, spec) for name in patch_shapes(spec)} if spec else {}
    lengths = dict.fromkeys(dtypes, patches)
    dtypes |= dict.fromkeys(WORDS, np.uint32)
    return {
        name: jax.ShapeDtypeStruct((1, lengths.get(name, positions), *shapes.get(name, ())), dtypes.get(name, np.int32))
        for name in names
    }


def record_shapes(
    fn: Callable[[Context, Any, jax.Array], Any], inputs: Mapping[str, Any], parameters: Any, x: Any
) -> RecordedWork:
    """The work of ``fn(context, parameters, x)``, from the shapes of its arguments."""
    submesh = Submesh.of(Layout(), (0,), [PlannedDevice(0)])

    def body(inputs: Any, parameters: Any, x: jax.Array) -> jax.Array:
        fn(Context.of(submesh.axes, inputs, "full"), parameters, x)
        return jnp.zeros(())

    replicated = PartitionSpec()
    mapped = jax.shard_map(body, mesh=submesh.mesh, in_specs=replicated, out_specs=replicated)
    with recording() as record:
        jax.eval_shape(mapped, dict(inputs), parameters, x)
    return record
