"""Work of generators as the planner counts it, beside the formulas of the study of Stable Diffusion."""

from __future__ import annotations

from pathlib import Path

import pytest
from trial_runs import write_tiny

from mmjax.assembly.model import build_model
from mmjax.config import load_config
from mmjax.configurable import from_preset
from mmjax.data.loader import tokenizer_of
from mmjax.models.projector.layers import projector_flops
from mmjax.models.unet.config import UNetConfig
from mmjax.plan.work import module_work
from studies.stable_diffusion import SCALE, unet

DRAWS = ("Model.generators={'painter': 'unet'}", "Digits.draw=1.0", "painter/Layout.rank_offset=4")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pixels", [512, 1024])
def test_a_plan_counts_the_unet_as_its_formula_does(pixels: int, tmp_path: Path) -> None:
    side = pixels // SCALE
    bindings = ("painter/UNet.preset='sd-2.1'", f"painter/UNet.canvases=(({side}, {side}),)", "Digits.drawn_scale=8")
    recipe = load_config((str(write_tiny(tmp_path)),), (*DRAWS, "Data.sequence_length=256", *bindings))
    model = build_model(recipe, tokenizer_of(recipe.data.settings, recipe.model.media))
    queries = from_preset(UNetConfig, "sd-2.1").queries
    work = module_work(recipe, model, "painter", queries + side**2)
    formula = unet(pixels)
    assert work.layers == 1 and work.forward.layer == formula.flops and work.forward.last == 0
    assert work.parameters.layer == formula.parameters
    (widths,) = model.projector_widths("painter").values()
    assert work.forward.first == projector_flops(*widths, queries), "the projector of the condition"
    assert work.backward.layer == 2 * formula.flops
