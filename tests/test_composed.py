"""Models of a tower and a language model from folders of their own, and a projector between them, against torch.

``tests/oracles/make_composed.py`` made what torch gives. The projector begins with new values; here with torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from trial_runs import write_tiny

from mmjax.config import load_config
from mmjax.data.types import Sample
from mmjax.recipe import Recipe
from mmjax.train.trainer import Trainer

ORACLES = Path(__file__).parent / "oracles"
IMAGE = 263
MODELS: Mapping[str, tuple[str, ...]] = {
    "clip_mlp_llama": (
        *(f"vision/Weights.path={str(ORACLES / 'vision' / 'clip')!r}", "vision/ViT.merge=1"),
        *(f"llm/Weights.path={str(ORACLES / 'llava')!r}", "vision/Projector.activation='gelu_exact'"),
    ),
    "siglip_shuffle_qwen2": (
        *(f"vision/Weights.path={str(ORACLES / 'vision' / 'siglip')!r}", "vision/ViT.merge=2"),
        *(f"llm/Weights.path={str(ORACLES / 'onevision')!r}", "vision/Projector.kind='linear'"),
    ),
}
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one device": ("llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0"),
    "tp and pp": ("llm/Layout.tp=2", "llm/Layout.pp=2", "vision/Layout.dp=1", "vision/Layout.rank_offset=4"),
}

FAST = ("siglip_shuffle_qwen2", "one device")


def configured(folder: Path, name: str, layout: str) -> Recipe:
    path = write_tiny(folder)
    own = ("vision/ViT", "llm/Decoder", "Packing")
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith(own)))
    settings = ("Data.sequence_length=128", "Train.eval_samples=0", "Train.clip_norm=0.0", "Train.global_batch=3")
    packed = ("Train.microbatches=1", "llm/Packing.buckets=((1, 128),)", "vision/Packing.buckets=((2, 60),)")
    return load_config([path], [*settings, *packed, *MODELS[name], *LAYOUTS[layout]])


def samples(values: Mapping[str, np.ndarray], name: str, placeholder: int) -> list[Sample]:
    """The sequences; a token counts unless it is an image's."""
    images, found = list(values["images"].astype(np.float32)), []
    each = 16 if name.startswith("clip") else 4
    for number in range(3):
        tokens = values[f"{name}/tokens_{number}"].astype(np.int32)
        is_image = tokens == IMAGE
        own = tuple(images.pop(0) for _ in range(is_image.sum() // each))
        about: Any = {"question": "", "answer": "", "prompt": 0, "media_tokens": {"vision": placeholder}}
        tokens = np.where(is_image, placeholder, tokens).astype(np.int32)
        weights = (~is_image).astype(np.float32)
        found.append(Sample(tokens=tokens, loss_weights=weights, media={"vision": own}, **about))
    assert not images
    return found


def projector(values: Mapping[str, np.ndarray], start: str, leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Torch's values of the projector's leaves, placed as these are; 0 for a bias that torch's has not."""
    found = {}
    for name, leaf in leaves.items():
        if name.startswith("params/vision_projector/"):
            given = values.get(f"{start}/{name.rpartition('/')[2]}", np.zeros(leaf.shape, np.float32))
            found[name] = jax.device_put(given.T if given.ndim == 2 else given, leaf.sharding)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) == FAST else [pytest.mark.long])
        for name in MODELS
        for layout in LAYOUTS
    ],
)
def test_the_first_loss_and_its_gradients_are_those_of_torch(name: str, layout: str, tmp_path: Path) -> None:
    values, config = dict(np.load(ORACLES / "composed" / "values.npz")), configured(tmp_path, name, layout)
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        assert [line.split(":")[0] for line in trainer.started] == ["vision", "llm", "vision_projector"]
        leaves, stages = trainer.leaves(), trainer.parts.placed.stages
        fresh = {own: np.asarray(leaf) for own, leaf in leaves.items() if own.startswith("params/vision_projector/")}
        given = projector(values, name, leaves)
        trainer.executor.states = {n: own.state.from_logical({**leaves, **given}, 0) for n, own in stages.items()}
        batch = trainer.parts.packer.microbatch(samples(values, name, trainer.parts.tokenizer.media_token("vision")), 3)
        count = float(np.sum(np.asarray(batch.inputs["llm"]["weights"])))
        loss, _ = trainer.executor.step(trainer.parts.runs.signed([batch]), {"llm": count, "vision": 1.0}).fetch()
        moments = {own: np.asarray(leaf) for own, leaf in trainer.leaves().items() if own.startswith("adam_m/")}
        b1 = config.model.optimizers["vision_projector"].b1
    assert loss == pytest.approx(float(values[f"{name}/loss"]), rel=2e-6)
    assert given.keys() == fresh.keys() and any(np.any(leaf) for leaf in fresh.values())
    for key in (own for own in values if own.startswith(f"{name}/gradient/")):
        got = moments[f"adam_m/vision_projector/{key.rpartition('/')[2]}"] / (1 - b1)
        want = values[key].T if values[key].ndim == 2 else values[key]
        np.testing.assert_allclose(got, want, rtol=0, atol=4e-5 * np.abs(want).max(), err_msg=key)
