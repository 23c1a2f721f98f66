"""Guidance combines two predictions picture by picture."""

from __future__ import annotations

import numpy as np

from mmjax.models.guidance import Guidance

SEGMENTS = np.array([[1, 1, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0]])


def predictions() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    return rng.standard_normal((2, 6, 5)).astype(np.float32), rng.standard_normal((2, 6, 5)).astype(np.float32)


def test_a_scale_goes_from_without_to_with_and_beyond() -> None:
    given, plain = predictions()
    for scale, want in ((0.0, plain), (1.0, given), (3.0, 3 * given - 2 * plain)):
        np.testing.assert_allclose(Guidance(scale=scale).combine(given, plain, SEGMENTS), want, atol=1e-5)
    assert not Guidance().is_on and Guidance(scale=0.0).is_on


def test_a_rescaled_picture_has_the_deviation_of_the_prediction_with_its_condition() -> None:
    given, plain = predictions()
    guided = Guidance(scale=4.0).combine(given, plain, SEGMENTS)
    whole = Guidance(scale=4.0, rescale=1.0).combine(given, plain, SEGMENTS)
    half = Guidance(scale=4.0, rescale=0.5).combine(given, plain, SEGMENTS)
    for row, number in ((0, 1), (0, 2), (1, 1)):
        at = row, SEGMENTS[row] == number
        want = guided[at] * given[at].std(ddof=1) / guided[at].std(ddof=1)
        np.testing.assert_allclose(whole[at], want, rtol=1e-4)
        np.testing.assert_allclose(half[at], (want + guided[at]) / 2, rtol=1e-4)
    assert np.isfinite(whole).all()
