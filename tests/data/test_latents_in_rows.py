"""Inputs of a generator whose latents are encoded in the step: with latents they are those of latents made ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmjax.assembly.latents import encoded_in_step
from mmjax.data.buckets import fill_buckets
from mmjax.data.derived import completed_worst
from mmjax.data.packing import Packer
from mmjax.data.process import Process
from mmjax.data.types import EncoderSpec, Sample
from mmjax.parity.samples import BatchSizes, Maker, Samples

PROCESSES = {
    "flow": Process(shift=3.0),
    "noise": Process(process="ddpm", prediction="noise"),
    "v": Process(process="ddpm", prediction="v", zero_snr=True, min_snr=5.0),
    "sample": Process(process="ddpm", prediction="sample"),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_mixtures_and_targets_are_linear_in_the_medium(name: str) -> None:
    process, rng = PROCESSES[name], np.random.default_rng(0)
    x, noise = rng.standard_normal((2, 5, 3), np.float32)
    for time in (process.time_at(0.0), process.time_at(0.4), process.time_at(0.999), process.pure):
        of_mixture, of_target = process.medium_shares(time)
        none = np.zeros_like(x)
        mixture, target = process.mixture(none, noise, time), process.target(none, noise, time)
        np.testing.assert_allclose(mixture + of_mixture * x, process.mixture(x, noise, time), atol=1e-6)
        np.testing.assert_allclose(target + of_target * x, process.target(x, noise, time), atol=1e-6)


PAINTERS = {
    "packed": EncoderSpec(patch=2, merge=1, channels=4, drawn=True, process=PROCESSES["flow"]),
    "with references": EncoderSpec(
        **{"patch": 2, "channels": 4, "drawn": True, "queries": 2, "special": 2, "references": 2},
        process=PROCESSES["flow"],
    ),
    "on canvases": EncoderSpec(
        **{"patch": 1, "channels": 4, "drawn": True, "queries": 2, "special": 2, "multiple": 2},
        **{"canvases": ((4, 4), (8, 8)), "bounded_by": "canvases"},
        process=PROCESSES["v"],
    ),
}


def packer_of(specs: dict[str, EncoderSpec], cells: int) -> Packer:
    worst = Samples(maker=Maker(encoders=specs, vocab=64), sizes=BatchSizes.of(cells, 1), seed=0).worst_case()
    worst = completed_worst(worst, specs)
    encoders = fill_buckets(specs, worst, rows_per_cell=4, sequence_length=20)
    return Packer(encoders=encoders, sequence_length=20, microbatches=1, cells=cells, pad=0, lists=False)


@pytest.mark.parametrize("cells", [1, 2])
@pytest.mark.parametrize("kind", PAINTERS)
def test_latents_enter_their_own_patches(kind: str, cells: int) -> None:
    """A latent is any function of a picture here: means and deviations at each place of each canvas."""
    painter = PAINTERS[kind]
    vae = EncoderSpec(patch=2, channels=3, canvases=((4, 4), (8, 8)), bounded_by="canvases", text_index=None)
    reading = replace(painter, reads=(("llm", ""), ("vae", "")))
    encoded = encoded_in_step({"painter": reading, "vae": vae}, "vae", "painter")
    maker, rng = Maker(encoders=encoded, vocab=64), np.random.default_rng(1)
    samples = [maker.sample(rng, number) for number in (2, 3, 5, 6, 7, 1, 4, 2)]
    inputs = packer_of(encoded, cells).step(0, samples).microbatches[0].inputs
    specs = {"painter": replace(painter, reads=(("llm", ""),))}
    wanted = packer_of(specs, cells).step(0, [with_latents(sample) for sample in samples]).microbatches[0].inputs
    of_painter, ahead = inputs["painter"], wanted["painter"]
    tokens = tokens_of(inputs["vae"]["patches"], cells)
    index = of_painter["vae_index"].reshape(cells, -1)
    taken = np.stack([np.where((i >= 0)[:, None], cell[i], 0) for i, cell in zip(index, tokens, strict=True)])
    mean, deviation = (half.reshape(of_painter["latent_noise"].shape) for half in np.split(taken, 2, axis=-1))
    latents = mean + deviation * of_painter["latent_noise"]
    for number, name in enumerate(("patches", "targets")):
        actual = of_painter[name] + of_painter["latent_shares"][..., number : number + 1] * latents
        np.testing.assert_allclose(actual, ahead[name], atol=1e-5, err_msg=name)
    for name in ("segments", "positions", "times", "weights", "index"):
        np.testing.assert_array_equal(of_painter[name], ahead[name], err_msg=name)
    assert np.count_nonzero(ahead["weights"]) and np.count_nonzero(latents)


def tokens_of(patches_RTE: Any, cells: int) -> np.ndarray:
    """Means and deviations of each place of pictures, from its own pixels, [cells, places, 8]."""
    places = np.asarray(patches_RTE).reshape(cells, -1, 12)
    return np.concatenate([places[..., :4] * 2, np.abs(places[..., 4:8])], axis=-1)


def with_latents(sample: Sample) -> Sample:
    """The sample with latents by `tokens_of` in place of noise, and of pictures that others are made from."""
    media, references, pictures = dict(sample.media), dict(sample.references), iter(sample.media.get("vae", ()))
    media.pop("vae", None)

    def halves(picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        height, width, _ = picture.shape
        cut = picture.reshape(height // 2, 2, width // 2, 2, 3).swapaxes(1, 2).reshape(height // 2, width // 2, 12)
        return cut[..., :4] * 2, np.abs(cut[..., 4:8])

    behind, latents, followed = references.get("painter") or ((),) * len(media["painter"]), [], []
    for noise, of_medium in zip(media["painter"], behind, strict=True):
        mean, deviation = halves(next(pictures))
        latents.append(mean + deviation * noise)
        followed.append(tuple(halves(next(pictures))[0] for _ in of_medium))
    references |= {"painter": tuple(followed)} if "painter" in references else {}
    return replace(sample, media={**media, "painter": tuple(latents)} if latents else media, references=references)
