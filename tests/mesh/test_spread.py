"""Specs of every kind of array, by the axes of a submesh."""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

from mmjax.mesh.spread import Axes, Spread

PLAIN = Spread.of(Axes())
INSTANCES = Spread.of(Axes(dp=("instance", "dp"), instance=("instance",)))
CUT = Spread.of(Axes(positions=("cp",)))
"""Rows whose tokens lie on several ranks, as context parallelism has them."""


def test_rows_lie_over_dp_and_are_whole_on_every_rank_of_cp_and_tp() -> None:
    assert (PLAIN.tokens, PLAIN.whole_rows, PLAIN.replicated, PLAIN.per_rank) == (
        P(("dp",)),
        P(("dp",)),
        P(),
        P(("dp", "cp", "tp")),
    )
    assert (PLAIN.data, PLAIN.same_tokens) == (("dp",), ("cp", "tp"))
    assert (INSTANCES.tokens, INSTANCES.same_tokens) == (P(("instance", "dp")), ("cp", "tp"))


def test_positions_may_be_split_as_well() -> None:
    """Then a rank of cp has tokens, losses and gradient sums of its own."""
    assert (CUT.tokens, CUT.whole_rows) == (P(("dp",), ("cp",)), P(("dp",)))
    assert (CUT.activation(inside=True), CUT.activation(inside=False)) == (CUT.tokens, CUT.whole_rows)
    assert (CUT.data, CUT.same_tokens, CUT.same_rows) == (("dp", "cp"), ("tp",), ("cp", "tp"))
    assert CUT.gradient_sums(P(None, ("tp",))) == P(("dp", "cp"), None, ("tp",))


def test_tp_splits_heads_hidden_units_and_the_vocabulary() -> None:
    assert PLAIN.parameter(("embed", "heads"), stacked=True) == P(None, None, ("tp",))
    assert PLAIN.parameter(("vocab", "embed"), stacked=False) == P(("tp",), None)
    assert PLAIN.parameter(("mlp",), stacked=False) == P(("tp",))
    assert PLAIN.gradient_sums(PLAIN.parameter(("embed", "mlp"), stacked=False)) == P(("dp",), None, ("tp",))


def test_a_residual_is_stacked_over_the_axes_that_it_varies_over_in_their_order() -> None:
    assert PLAIN.residual({"tp", "dp"}) == (("dp", "tp"), P(("dp", "tp")))
    assert PLAIN.residual(()) == ((), P(()))
