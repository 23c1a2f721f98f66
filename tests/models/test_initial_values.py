"""Initial values stay what they are from version to version: kept results and comparisons of runs hang on them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mmjax.mesh.layout import Layout
from mmjax.models.dit.config import DiTConfig
from mmjax.models.graph import multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.parameters import split_logical
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.models.whisper.config import WhisperConfig

KEPT = Path(__file__).with_name("initial_values.json")
SIZES: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "mlp": 24}
VISION = ViTConfig(**SIZES, patch=2, merge=2, positions="learned2d", grid=4)
AUDIO = WhisperConfig(**SIZES, mels=8, merge=2, positions="learned", length=12)
MODEL = multimodal(
    encoders={"vision": VISION, "audio": AUDIO},
    llm=DecoderConfig(layers=3, width=24, heads=4, kv_heads=2, mlp=40, vocab=37),
    generators={"painter": DiTConfig(**SIZES, patch=2, merge=2)},
    projectors={"vision": ProjectorConfig(hidden=8, inject=(1,))},
)


def initial_norms(pp: int) -> dict[str, float]:
    """Norm of each leaf, of all modules in stages."""
    layouts = dict.fromkeys(MODEL.nodes, Layout()) | {"llm": Layout(pp=pp)}
    norms: dict[str, float] = {}
    for stage in MODEL.stages(layouts):
        for part in stage.slices:
            params = jax.jit(part.initialise)(jax.random.key(3))
            named = split_logical(jax.tree.leaves(part.leaves()), jax.tree.leaves(params))
            norms |= {name: float(np.linalg.norm(np.asarray(x, np.float64))) for name, x in named.items()}
    return dict(sorted(norms.items()))


@pytest.mark.long
@pytest.mark.parametrize("pp", [1, 3])
def test_every_leaf_starts_as_it_always_did(pp: int) -> None:
    kept = json.loads(KEPT.read_text())
    assert len({norm for name, norm in kept.items() if "norm" not in name and norm}) > 40
    assert initial_norms(pp) == pytest.approx(kept, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("unroll", [False, True])
def test_layers_of_one_stack_start_as_layers_that_are_created_alone(unroll: bool) -> None:
    """The programs round differently, in the last bit."""
    model = replace(MODEL, unroll=unroll)
    for stage in model.stages(dict.fromkeys(MODEL.nodes, Layout())):
        for part in stage.slices:
            alone, stacked = (
                jax.jit(partial(part.initialise, stack=stack))(jax.random.key(3)) for stack in (False, True)
            )
            assert jax.tree.structure(alone) == jax.tree.structure(stacked)
            for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(stacked), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_a_projector_starts_with_its_standard_deviations(kind: str) -> None:
    stds = (0.02, 0.3)[: 2 if kind == "mlp" else 1]
    projector = ProjectorConfig(kind=kind, hidden=256 * (kind == "mlp"), stds=stds, inject=(1,))
    llm = DecoderConfig(layers=3, width=192, heads=4, kv_heads=2, mlp=40, vocab=37)
    model = multimodal(encoders={"vision": VISION}, llm=llm, projectors={"vision": projector})
    values: dict[str, np.ndarray] = {}
    for stage in model.stages(dict.fromkeys(model.nodes, Layout())):
        for part in stage.slices:
            named = split_logical(jax.tree.leaves(part.leaves()), jax.tree.leaves(part.initialise(jax.random.key(3))))
            values |= {name: np.asarray(x) for name, x in named.items() if name.startswith("vision_projector/")}
    weights = {"up": 0.02, "down": 0.3} if kind == "mlp" else {"kernel": 0.02}
    for path in ("", "inject001/"):
        for name, std in weights.items():
            weight = values[f"vision_projector/{path}{name}"]
            assert np.std(weight) == pytest.approx(std, rel=0.03) and abs(np.mean(weight)) < 0.05 * std
    assert not any(value.any() for name, value in values.items() if name.endswith("bias"))
