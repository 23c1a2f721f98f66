"""Class tokens and registers, rotation by patches' centres and gated mlps, as in DINOv2 and DINOv3, under layouts."""

from __future__ import annotations

from tiny import NESTED, Changes, cases, layouts, tiny

from mmjax.parity import check

DINOV3: Changes = {
    **{"vision/ViT.positions": "axial_centres", "vision/ViT.class_token": True, "vision/ViT.registers": 2},
    **{"vision/ViT.k_bias": False, "vision/ViT.layer_scale": True, "vision/ViT.gated": True},
}
DINOV2: Changes = {
    **{"vision/ViT.positions": "learned2d", "vision/ViT.grid": 5, "vision/ViT.interpolate": "bicubic_smooth"},
    **{"vision/ViT.class_token": True, "vision/ViT.registers": 4, "vision/ViT.layer_scale": True},
    "vision/ViT.qkv_bias": False,
}


SPLIT: Changes = {"Train.schedule": "zb-h1", "vision/Layout.layers": (1, 1)}
MATRIX: dict[str, Changes] = {
    "centres, cp and tp": DINOV3 | layouts(4, {"cp": 2, "tp": 2}, tp=2),
    "centres, two stages of tp, zb-h1": DINOV3 | layouts(4, {"pp": 2, "tp": 2}, pp=2, tp=2) | SPLIT,
    "centres, nested, lanes": DINOV3 | layouts(0, {"tp": 2}, pp=2, tp=2) | NESTED,
    "a smoothed table, cp by rings": DINOV2 | layouts(2, {"cp": 3, "cp_way": "ring"}, tp=2),
    "a smoothed table, two stages of tp": DINOV2 | layouts(4, {"pp": 2, "tp": 2}, pp=2, tp=2),
    "a smoothed table, nested, lanes": DINOV2 | layouts(0, {"tp": 2}, pp=2, tp=2) | NESTED,
    "an image reads a corner of the table": DINOV2
    | layouts(2, {"dp": 2}, tp=2)
    | {"vision/ViT.grid": 32}
    | {"vision/ViT.interpolate": "none"},
    "registers without a class token": DINOV3
    | layouts(0, {})
    | {"vision/ViT.class_token": False, "llm/Decoder.layers": 1},
}


@cases(MATRIX)
def test_they_train_as_on_one_device(changes: Changes) -> None:
    report = check(tiny(**changes), style="silent")
    assert report and report.ok, report and report.numbers()
