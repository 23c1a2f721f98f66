"""Which files are mutated, and which tests ought to kill their mutants: cheap unit tests first, whole steps last."""

from __future__ import annotations

PARITY = "tests/pipeline/test_parity.py::test_training_equals_the_dense_reference"


def parity(*cases: str) -> tuple[str, ...]:
    """Cases of the comparison with the dense reference."""
    return tuple(f"{PARITY}[{case}]" for case in cases)


ROUTES, COLLECTIVES, BOUNDARY = (f"tests/mesh/test_{name}.py" for name in ("routes", "collectives", "boundary"))
SUBMESH, LAYOUT, SPMD = (f"tests/mesh/test_{name}.py" for name in ("submesh", "layout", "spmd"))
STAGE, ZERO, EXECUTOR = (f"tests/pipeline/test_{name}.py" for name in ("stage", "zero", "executor"))
COMPAT = "tests/test_jax_compat.py"

TARGETS: dict[str, tuple[str, ...]] = {
    "mmjax/jax_compat.py": (COMPAT,),
    "mmjax/mesh/routes.py": (ROUTES,),
    "mmjax/mesh/layout.py": (LAYOUT, SUBMESH),
    "mmjax/mesh/submesh.py": (SUBMESH, ROUTES),
    "mmjax/mesh/spmd.py": (SPMD,),
    "mmjax/mesh/collectives.py": (COLLECTIVES, BOUNDARY),
    "mmjax/mesh/boundary.py": (BOUNDARY,),
    "mmjax/mesh/transport.py": (BOUNDARY,),
    "mmjax/pipeline/zero.py": (ZERO, *parity("fan-in, clipped and decayed")),
    "mmjax/pipeline/stage_state.py": (ZERO, *parity("fan-in, clipped and decayed", "one device"), EXECUTOR),
    "mmjax/pipeline/stage.py": (STAGE, *parity("one device", "fan-in")),
    "mmjax/pipeline/world_norm.py": parity("one device", "fan-in, clipped and decayed", "colocated"),
    "mmjax/pipeline/walker.py": (*parity("fan-in", "vision on the first stage"), EXECUTOR),
    "mmjax/pipeline/executor.py": (*parity("fan-in", "fan-in, vision frozen"), EXECUTOR),
    "mmjax/pipeline/straight.py": (*parity("one device", "colocated"), EXECUTOR),
}
