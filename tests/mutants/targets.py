"""Which files are mutated, and which tests ought to kill their mutants: cheap unit tests first, whole steps last."""

from __future__ import annotations


def toy(*cases: str) -> tuple[str, ...]:
    """Steps of a small made-up model: a second each."""
    return tuple(f"tests/pipeline/test_toy_steps.py::test_steps_equal_one_device[{case}]" for case in cases)


ROUTES, COLLECTIVES, BOUNDARY = (f"tests/mesh/test_{name}.py" for name in ("routes", "collectives", "boundary"))
SUBMESH, LAYOUT, SPMD = (f"tests/mesh/test_{name}.py" for name in ("submesh", "layout", "spmd"))
STAGE, ZERO, EXECUTOR = (f"tests/pipeline/test_{name}.py" for name in ("stage", "zero", "executor"))
NORM, PREDICT, TIES = (f"tests/pipeline/test_{name}.py" for name in ("world_norm", "predict", "ties"))
COMPAT = "tests/test_jax_compat.py"

TARGETS: dict[str, tuple[str, ...]] = {
    "mmjax/jax_compat.py": (COMPAT,),
    "mmjax/mesh/routes.py": (ROUTES,),
    "mmjax/mesh/layout.py": (LAYOUT, SUBMESH),
    "mmjax/mesh/submesh.py": (SUBMESH, ROUTES),
    "mmjax/mesh/spmd.py": (SPMD,),
    "mmjax/mesh/collectives.py": (COLLECTIVES, BOUNDARY),
    "mmjax/mesh/boundary.py": (BOUNDARY,),
    "mmjax/mesh/transfer.py": (BOUNDARY,),
    "mmjax/mesh/routing.py": (BOUNDARY,),
    "mmjax/mesh/movers.py": (BOUNDARY,),
    "mmjax/pipeline/zero.py": (ZERO, *toy("apart")),
    "mmjax/pipeline/stage_state.py": (*toy("apart", "one program"), ZERO, EXECUTOR),
    "mmjax/pipeline/stage.py": (*toy("apart"), STAGE, PREDICT),
    "mmjax/pipeline/world_norm.py": (NORM, *toy("apart")),
    "mmjax/pipeline/ties.py": (*toy("apart"),),
    "mmjax/pipeline/walker.py": (*toy("apart", "apart, eye frozen"), EXECUTOR),
    "mmjax/pipeline/executor.py": (*toy("apart", "apart, eye frozen"), EXECUTOR),
    "mmjax/pipeline/straight.py": (*toy("one program", "one program, llm frozen, 1 microbatch"), EXECUTOR),
}
