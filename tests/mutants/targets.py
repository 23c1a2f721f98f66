"""Which files are mutated, and which tests ought to kill their mutants: cheap unit tests first, whole steps last."""

from __future__ import annotations

import functools
from pathlib import Path

from mutations import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]

TOY = "tests/pipeline/test_toy_steps.py"


def toy(*cases: str) -> tuple[str, ...]:
    """Steps of a small made-up model: a few seconds each."""
    return tuple(f"{TOY}::test_steps_equal_one_device[{case}]" for case in cases)


BF16, WHOLE = f"{TOY}::test_compute_in_bf16_keeps_masters_in_fp32", f"{TOY}::test_a_step_is_whole_or_not_at_all"
RATES = f"{TOY}::test_a_stage_knows_the_learning_rates_of_what_it_trains"
UNTRAINED = f"{TOY}::test_with_nothing_trained_a_step_is_its_loss"
NARROW = (
    "tests/pipeline/test_frozen_storage.py::test_what_is_held_in_less_is_computed_with_as_if_it_were_wide"
    "[colocated, sharded encoder, adapters]"
)
FROZEN, SINGLE = "apart, eye frozen", "one program, llm frozen, 1 microbatch"

ROUTES, COLLECTIVES, BOUNDARY = (f"tests/mesh/test_{name}.py" for name in ("routes", "collectives", "boundary"))
LISTED = "tests/mesh/test_listed.py"
SUBMESH, LAYOUT, SPMD = (f"tests/mesh/test_{name}.py" for name in ("submesh", "layout", "spmd"))
HANDLES = "tests/pipeline/test_split.py::test_a_handle_has_the_gradient_of_what_is_stored[vision.0]"
STAGE, ZERO = (f"tests/pipeline/test_{name}.py" for name in ("stage", "zero"))
NORM, PREDICT = (f"tests/pipeline/test_{name}.py" for name in ("world_norm", "predict"))
# Of the executor on real modules: what is in flight.
EXECUTOR = "tests/pipeline/test_executor.py::test_a_stage_without_backward_drops_its_inputs_at_once"
RESULTS = "tests/pipeline/test_step_results.py"
COMPAT, JAXPRS = "tests/test_jax_compat.py", "tests/test_jaxprs.py"
SPLIT, OFFLOAD = "tests/pipeline/test_split.py", "tests/pipeline/test_offload.py"
ENDS = tuple(
    f"tests/pipeline/test_awaiting.py::test_the_end_of_{what}_made"
    for what in ("an_op_is_that_of_what_it", "a_split_backward_is_that_of_what_each_half")
)
STASH = "tests/pipeline/test_stash_arrays.py"
COPIES = (
    f"{OFFLOAD}::test_programs_read_from_devices_and_overwrite_nothing_that_is_copied",
    f"{OFFLOAD}::test_only_where_bytes_are_changes",
    f"{STASH}::test_only_where_bytes_are_changes",
    f"{STASH}::test_a_stash_has_ended_when_every_array_is_there",
)

TARGETS: dict[str, tuple[str, ...]] = {
    "mmjax/jax_compat.py": (COMPAT,),
    "mmjax/jaxprs.py": (JAXPRS,),
    "mmjax/mesh/routes.py": (ROUTES, LISTED),
    "mmjax/mesh/layout.py": (LAYOUT, SUBMESH),
    "mmjax/mesh/spread.py": ("tests/mesh/test_spread.py", SUBMESH, LISTED, BOUNDARY, *toy("apart")),
    "mmjax/mesh/submesh.py": (SUBMESH, ROUTES, LISTED),
    "mmjax/mesh/spmd.py": (SPMD, BOUNDARY),
    "mmjax/mesh/collectives.py": (COLLECTIVES, BOUNDARY),
    "mmjax/mesh/boundary.py": (LISTED, BOUNDARY),
    "mmjax/mesh/transfer.py": (LISTED, BOUNDARY),
    "mmjax/mesh/routing.py": (LISTED, BOUNDARY),
    "mmjax/mesh/movers.py": (BOUNDARY,),
    "mmjax/pipeline/zero.py": (ZERO, *toy("apart")),
    "mmjax/pipeline/stage_state.py": (*toy("apart"), f"{WHOLE}[program per op]", RATES, BF16, ZERO, NARROW),
    "mmjax/pipeline/state_shapes.py": (*toy("apart"), f"{WHOLE}[program per op]", RATES, BF16, ZERO, NARROW),
    "mmjax/pipeline/stage_params.py": (*toy("apart"), STAGE, HANDLES),
    "mmjax/pipeline/rates.py": ("tests/test_optimizer.py", "tests/pipeline/test_rates.py", *toy("one program")),
    "mmjax/pipeline/stage.py": (*toy("apart", "zb-h1", "single"), STAGE, PREDICT, HANDLES),
    "mmjax/models/handles.py": (SPLIT,),
    "mmjax/models/taps.py": ("tests/models/test_taps.py", *toy("zb-h1"), SPLIT),
    "mmjax/pipeline/split.py": (*toy("zb-h1"), SPLIT),
    "mmjax/pipeline/offload.py": (OFFLOAD,),
    "mmjax/pipeline/world_norm.py": (NORM,),
    "mmjax/pipeline/ties.py": toy("apart"),
    "mmjax/pipeline/walker.py": ("tests/pipeline/test_walker.py", *toy("apart", FROZEN)),
    "mmjax/pipeline/executor.py": (
        *toy("apart"),
        RESULTS,
        *ENDS,
        *toy(FROZEN, "zb-h1"),
        f"{WHOLE}[program per op]",
        f"{UNTRAINED}[program per op]",
        BF16,
        EXECUTOR,
        *COPIES,
    ),
    "mmjax/pipeline/straight.py": (
        *toy("one program", SINGLE),
        f"{WHOLE}[straight line]",
        f"{UNTRAINED}[straight line]",
    ),
}

LEFT_OUT: dict[str, frozenset[str]] = {
    "mmjax/jax_compat.py": frozenset(("PlannedDevice",)),
}
"""Definitions in these files that are neither boundary nor stage code: estimates for dry runs."""


@functools.cache
def mutants_of(file: str) -> list[Mutant]:
    """The mutants of a target; read only."""
    return mutants(file, (ROOT / file).read_bytes(), LEFT_OUT.get(file, ()))
