"""Noise processes: times, mixtures, targets and weights, beside the reference's and the papers' formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmjax.configurable import ConfigError
from mmjax.data.process import Process
from mmjax.models.diffusion import Diffusion
from mmjax.reference.process import flow_times, noised

DDPM: dict[str, Any] = {"process": "ddpm", "prediction": "noise"}
PROCESSES: dict[str, dict[str, Any]] = {
    "flow": {},
    "noise": {**DDPM, "min_snr": 5.0},
    "v": {**DDPM, "prediction": "v", "betas": "linear", "min_snr": 5.0},
    "v, zero": {**DDPM, "prediction": "v", "zero_snr": True, "min_snr": 2.0},
    "sample": {**DDPM, "prediction": "sample", "betas": "squaredcos_cap_v2", "train_steps": 60},
    "sample, weighed": {**DDPM, "prediction": "sample", "min_snr": 5.0},
}


@pytest.mark.parametrize("name", PROCESSES)
def test_what_is_seen_and_learned_is_the_references(name: str) -> None:
    process, settings = Process(**PROCESSES[name]), Diffusion(**PROCESSES[name])
    rng = np.random.default_rng(3)
    x, noise = rng.uniform(-1, 1, (4, 4, 2)), rng.standard_normal((4, 4, 2))
    last = process.train_steps - 1
    for time in (0.0, 0.25, 0.9) if process.process == "flow" else (0, 7, last // 2, last):
        seen, target, weight = noised(settings, x, noise, time)
        np.testing.assert_allclose(process.mixture(x, noise, time), seen, atol=1e-6)
        np.testing.assert_allclose(process.target(x, noise, time), target, atol=1e-6)
        assert process.weight(time) == pytest.approx(weight, rel=1e-5)
    np.testing.assert_array_equal(process.mixture(x, noise, process.pure), noise)


def test_a_medium_is_predicted_back_from_the_target() -> None:
    """An error of the medium is SNR times one of the noise, so min-SNR weights agree (Hang et al. 2023, §3.4)."""
    rng = np.random.default_rng(0)
    x, noise, error = rng.standard_normal((3, 50))
    for time in (5, 300, 900):
        weighed = {}
        for prediction in ("noise", "v", "sample"):
            process = Process(process="ddpm", prediction=prediction, min_snr=5.0)
            of_x, of_noise = (float(share) for share in process.shares(time))
            # A wrong medium, said in terms of each target, given the same mixture.
            wrong = (process.mixture(x, noise, time) - of_x * (x + error)) / of_noise
            off = process.target(x + error, wrong, time) - process.target(x, noise, time)
            weighed[prediction] = process.weight(time) * np.square(off).sum()
        assert weighed["noise"] == pytest.approx(weighed["sample"], rel=1e-4)
        assert weighed["v"] == pytest.approx(weighed["sample"], rel=1e-4)


def test_the_weights_are_those_of_the_papers_snr() -> None:
    noise, v = (Process(process="ddpm", prediction=name, min_snr=5.0) for name in ("noise", "v"))
    for time in (1, 200, 999):
        kept = noise.signal_shares[time]
        snr = kept / (1 - kept)
        assert noise.weight(time) == pytest.approx(min(snr, 5) / snr, rel=1e-5)
        assert v.weight(time) == pytest.approx(min(snr, 5) / (snr + 1), rel=1e-5)
    assert noise.weight(1) < 0.1 and noise.weight(999) == 1 == replace(noise, min_snr=0.0).weight(1)


def test_times_of_a_flow() -> None:
    rng, plain = np.random.default_rng(5), Process()
    assert [plain.draw_time(np.random.default_rng(1), 4)] == [float(np.random.default_rng(1).random())]
    normal = Process(times="logit_normal", times_mean=0.5, times_std=0.7)
    drawn = np.array([normal.draw_time(rng, 4) for _ in range(4000)])
    logits = np.log(drawn / (1 - drawn))
    assert abs(logits.mean() - 0.5) < 0.05 and abs(logits.std() - 0.7) < 0.05
    shifted = Process(shift=3.0)
    times = np.array(
        [(shifted.draw_time(np.random.default_rng(n), 4), np.random.default_rng(n).random()) for n in range(9)]
    )
    np.testing.assert_allclose(times[:, 0], 3 * times[:, 1] / (1 + 2 * times[:, 1]))


def test_the_shift_follows_from_the_number_of_patches() -> None:
    """mu is base_shift at base_patches and max_shift at max_patches, and the reference has the same times."""
    process = Process(dynamic_shift=True, base_shift=0.5, max_shift=0.9, base_patches=256, max_patches=8192)
    for patches, mu in ((256, 0.5), (8192, 0.9), (4224, 0.7)):
        assert process.shifted(0.5, patches) == pytest.approx(np.exp(mu) / (np.exp(mu) + 1))
    every: list[dict[str, Any]] = [{}, {"shift": 2.5}, {"dynamic_shift": True, "terminal_time": 0.1}]
    for changes in every:
        settings = Diffusion(**changes, steps=5)
        np.testing.assert_allclose(settings.drawing.flow_times(300), flow_times(settings, 300), atol=1e-12)


def test_timesteps_of_a_ddpm_are_whole_and_all_are_drawn() -> None:
    process, rng = Process(process="ddpm", prediction="noise", train_steps=5), np.random.default_rng(0)
    assert {process.draw_time(rng, 4) for _ in range(200)} == {0.0, 1.0, 2.0, 3.0, 4.0}


def test_conditions_are_dropped_as_often_as_is_said() -> None:
    rng = np.random.default_rng(0)
    process = Process(drop_condition=0.2)
    assert 150 < sum(process.draw_dropped(rng) for _ in range(1000)) < 250
    before = rng.bit_generator.state
    assert not Process().draw_dropped(rng) and rng.bit_generator.state == before


@pytest.mark.parametrize(
    ("changes", "named", "legal"),
    [
        ({"process": "ddp"}, "DiT.process='ddp'", "did you mean 'ddpm'"),
        ({"process": "ddpm"}, "DiT.prediction='velocity'", "learns 'noise' or 'v' or 'sample'"),
        ({"prediction": "v"}, "DiT.prediction='v'", "learns 'velocity'"),
        (DDPM, "DiT.sampler='euler'", "drawn by 'ddim' or 'dpm++'"),
        ({"sampler": "ddim"}, "DiT.sampler='ddim'", "drawn by 'euler'"),
        ({**DDPM, "sampler": "ddim", "zero_snr": True}, "DiT.zero_snr=True", "DiT.prediction to 'v'"),
        ({**DDPM, "sampler": "ddim", "steps": 1001}, "DiT.steps=1001", "at most 1000 steps"),
        ({**DDPM, "sampler": "dpm++", "steps": 1000}, "DiT.steps=1000", "at most 999 steps"),
        ({**DDPM, "sampler": "ddim", "steps_offset": 60}, "DiT.steps_offset=60", "begin at 1010"),
        ({"drop_condition": 1.0}, "DiT.drop_condition=1.0", "such as 0.1"),
        ({"times": "normal"}, "DiT.times='normal'", "did you mean 'logit_normal'"),
        ({"shift": 0.0}, "DiT.shift=0.0", "must be above 0"),
        ({"max_patches": 200}, "DiT.max_patches=200", "above DiT.base_patches=256"),
        ({"beta_start": 0.5}, "DiT.beta_start=0.5", "use 0.00085 and 0.012"),
        ({"eta": 1.5}, "DiT.eta=1.5", "at most 1"),
        ({"terminal_time": 1.0}, "DiT.terminal_time=1.0", "such as 0.02"),
        ({"guidance_rescale": 2.0}, "DiT.guidance_rescale=2.0", "such as 0.7"),
        ({"guidance": -1.0}, "DiT.guidance=-1.0", "0 or more"),
        ({"spacing": "even"}, "DiT.spacing='even'", "'leading', 'trailing', 'linspace'"),
        ({"betas": "cosine"}, "DiT.betas='cosine'", "'squaredcos_cap_v2'"),
        ({"min_snr": -1.0}, "DiT.min_snr=-1.0", "0 or more"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(changes: dict[str, Any], named: str, legal: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Diffusion(**changes).check_diffusion("DiT")
    assert str(refused.value).startswith(named) and legal in str(refused.value) and "\n" not in str(refused.value)
