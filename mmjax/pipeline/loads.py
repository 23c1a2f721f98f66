"""Updates of parameters without a loss: the biases with which a router chooses experts.

The gradient of such a bias is its expert's load, the number of tokens that chose the expert. It is summed over
microbatches and ranks and reduced once a step as gradients are, so recomputation counts once. The bias then moves by a
constant towards equal loads (Wang et al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts", §2).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mmjax.pipeline.trees import by_name, with_leaves
from mmjax.pipeline.zero import ZeroLeaf

Tree = Any


def split_loads(zeros: Tree, grads: Tree) -> tuple[Tree, dict[str, jax.Array]]:
    """Takes the loads out of a module's gradients.

    ``zeros`` is the module's tree of ``ZeroLeaf``, such as ``state.owned["llm"]``; ``grads`` a tree like it, reduced.

    Returns:
      The gradients with zeros in place of loads, so that an optimizer's moments of them stay 0, and by name the updates
      of the biases.
    """
    named, updates, cleared = by_name(grads), dict[str, jax.Array](), dict[str, jax.Array]()
    for name, zero in by_name(zeros).items():
        if zero.leaf.is_load:
            updates[name] = _update(zero, named[name])
            cleared[name] = jnp.zeros_like(named[name])
    return (with_leaves(grads, cleared), updates) if cleared else (grads, updates)


def _update(zero: ZeroLeaf, loads_E: jax.Array) -> jax.Array:
    # Counts are integers. The sign of their differences is exact, as that of a rounded mean is not.
    total = jnp.sum(loads_E, axis=-1, keepdims=True)
    assert zero.leaf.load_rate is not None
    return zero.leaf.load_rate * jnp.sign(total - loads_E.shape[-1] * loads_E)
