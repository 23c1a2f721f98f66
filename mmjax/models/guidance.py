"""Classifier-free guidance: predictions with and without a condition, combined. NumPy only.

Shapes: R rows, T patches of a row, E numbers in a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """The combination of two predictions (Ho and Salimans 2022, "Classifier-Free Diffusion Guidance", eq. 6).

    Attributes:
      scale: the share of the condition: 0 draws without it, 1 with it, and more away from what is drawn without it.
      rescale: the share of a result whose deviation is that of the prediction with the condition (Lin et al. 2024,
        "Common Diffusion Noise Schedules and Sample Steps are Flawed", §3.4).
    """

    scale: float = 1.0
    rescale: float = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the prediction without the condition is needed."""
        return self.scale != 1

    def combine(self, with_RTE: np.ndarray, without_RTE: np.ndarray, segments_RT: np.ndarray) -> np.ndarray:
        """The guided prediction, [R, T, E].

        Args:
          with_RTE, without_RTE: the predictions with and without the condition.
          segments_RT: the number of each patch's picture in its row, 0 for padding.
        """
        guided_RTE = without_RTE + np.float32(self.scale) * (with_RTE - without_RTE)
        if not self.rescale:
            return guided_RTE
        factors_RT = np.ones(segments_RT.shape, np.float32)
        for row, segments_T in enumerate(segments_RT):
            for segment in np.unique(segments_T[segments_T > 0]):
                here = segments_T == segment
                deviation = guided_RTE[row, here].std(ddof=1)
                factors_RT[row, here] = with_RTE[row, here].std(ddof=1) / deviation if deviation else 1
        share = np.float32(self.rescale)
        return (share * factors_RT[..., None] + (1 - share)) * guided_RTE
