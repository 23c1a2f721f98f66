"""Named accelerators: figures that hang together, and the one line for a name that is none."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from mmjax.configurable import ConfigError
from mmjax.planner.accelerators import ACCELERATORS, Accelerator, accelerator


@pytest.mark.parametrize("name", ACCELERATORS)
def test_figures_are_of_a_device_and_each_has_a_source(name: str) -> None:
    device = ACCELERATORS[name]
    assert device.name.split()[0].lower() == name and f"{device.memory / 1e9:.0f}GB" in device.name
    assert 100e12 < device.flops < 1000e12 and 48e9 <= device.memory <= 141e9
    # Each hop is slower than the one before it; no figure is in bits, or of a whole node.
    assert 5e12 > device.bandwidth > device.link > device.network >= 12.5e9
    # PCIe 4.0 or 5.0 with 16 lanes, which those without NVLink have to each other too.
    assert device.host in (32e9, 64e9) and device.link >= device.host
    # An operation a byte: between 100 and 300 on all of these, so neither compute nor bandwidth is off by a power.
    assert 100 < device.flops / device.bandwidth < 300
    figures = {field.name for field in fields(device)} - {"name", "source"}
    sourced = [each.strip() for part in device.source.split("; ") for each in part.split(":")[0].split(",")]
    assert sorted(sourced) == sorted(figures)


def test_variants_differ_from_their_models_in_what_the_datasheets_say() -> None:
    def same(device: Accelerator, variant: Accelerator, **differs: float) -> bool:
        return replace(device, name="", source="", **differs) == replace(variant, name="", source="")

    assert same(accelerator("a100"), accelerator("a800"), link=400e9 / 2)
    assert same(accelerator("h100"), accelerator("h800"), link=400e9 / 2)
    assert same(accelerator("h100"), accelerator("h200"), memory=141e9, bandwidth=4.8e12)
    # With sparsity, which doubles the figure, the H100's datasheet says 1,979; an A100 has 312 without.
    assert accelerator("h100").flops / accelerator("a100").flops == pytest.approx(1979 / 2 / 312, rel=1e-3)
    assert accelerator("h100").link / accelerator("a100").link == 900 / 600
    assert accelerator("l20").flops / 362.05e12 == pytest.approx(0.33, abs=0.01), "a third of the L40S's"


def test_names_are_found_in_any_case_and_the_nearest_is_named() -> None:
    assert accelerator("H200") is ACCELERATORS["h200"]
    with pytest.raises(ConfigError) as error:
        accelerator("h1000")
    assert str(error.value) == "accelerator='h1000': there is none of this name; did you mean 'h100'?"
    with pytest.raises(ConfigError, match=r"use one of 'a100', 'a800'.*'a40'$"):
        accelerator("tpu-v5")
