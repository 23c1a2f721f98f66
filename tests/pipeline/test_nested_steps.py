"""128 steps of a nested schedule beside those of the encoder in the pipeline: "BigMac", §4.3, bitwise alignment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import parity
import pytest
from parity import Case
from test_nested import NESTED

from mmjax.mesh.layout import Layout

STEPS = 128
IN_PIPELINE = replace(NESTED, schedule="1f1b", vision=Layout(dp=2, rank_offset=4))


def losses(case: Case) -> list[float]:
    """The losses of `STEPS` steps over the case's batches in turn."""
    session = parity.Session(case).start()
    return [session.step(index % len(session.batches))[0] for index in range(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 5, 8])
def test_losses_are_those_of_the_encoder_in_the_pipeline(microbatches: int) -> None:
    sizes = {"microbatches": microbatches, "samples": 6 * microbatches - 1}
    nested, plain = (np.array(losses(replace(case, **sizes))) for case in (NESTED, IN_PIPELINE))
    assert plain[-1] < 0.9 * plain[0], "it learns"
    difference = np.abs(nested - plain)
    print(f"{microbatches} microbatches: average {difference.mean():.2e}, most {difference.max():.2e}")
    assert difference.mean() <= 1e-6
