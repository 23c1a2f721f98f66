"""Counts of Stable Diffusion 2.1: parameters, FLOPs and kept bytes."""

from __future__ import annotations

from studies.stable_diffusion import Count, picture_encoder, unet


def test_counts_of_stable_diffusion() -> None:
    assert unet(512).parameters == 865_910_724 and picture_encoder(512).parameters == 34_163_592
    one = Count()
    one.residual(320, 640, 100, 1280)
    assert one.flops == 2 * (100 * (9 * 320 * 640 + 9 * 640 * 640 + 320 * 640) + 1280 * 640)
    attended = Count()
    attended.attention(64, 100, 77)
    assert attended.flops == 4 * 100 * 77 * 64 and attended.kept_bytes == 2 * 64 * (100 + 2 * 77)
    # Four times the places: convolutions take four times as long, attention of the first levels sixteen times.
    assert 4 < unet(1024).flops / unet(512).flops < 16 and unet(1024).parameters == unet(512).parameters
