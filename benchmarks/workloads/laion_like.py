"""``python -m benchmarks.workloads.laion_like``: writes `laion_like.json`, the samples of one global batch.

They are drawn here and come from no data set. They imitate what papers report about LAION-400M in training sequences:
the sizes of images and of samples are skewed, with a few very large ones (Zhang et al., "DistTrain", §2.3, figure 5).
The patches of a sample follow a lognormal distribution with σ = 1, cut off at 8,192, the tokens of a sequence. The file
is under this project's licence.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("laion_like.json")
SAMPLES, SEED, SIGMA, MEDIAN, MOST = 1920, 20240807, 1.0, 512, 8192


def draw() -> dict[str, object]:
    """The content of the file."""
    # Uniform numbers of PCG64 and Box and Muller's transform: no distribution of a library that may change.
    uniform = np.random.Generator(np.random.PCG64(SEED)).random((2, SAMPLES))
    normal = np.sqrt(-2 * np.log1p(-uniform[0])) * np.cos(2 * np.pi * uniform[1])
    patches = np.clip(np.rint(MEDIAN * np.exp(SIGMA * normal)), 1, MOST).astype(int)
    return {
        "about": "Patches of each sample of a global batch, drawn by benchmarks/workloads/laion_like.py; Apache-2.0",
        "sigma": SIGMA,
        "seed": SEED,
        "patches": patches.tolist(),
    }


def read() -> np.ndarray:
    """Patches of each sample [1920]."""
    return np.array(json.loads(PATH.read_text())["patches"])


if __name__ == "__main__":
    PATH.write_text(json.dumps(draw(), separators=(",", ":")) + "\n")
