"""Sizes of the exchange of tokens among ranks with different experts, which a plan counts too. Imports no JAX."""

from __future__ import annotations

import math

HALF_TOKENS = 1024
"""The least number of a rank's tokens in a half: products of fewer take longer in halves than the exchange."""


def sent_share(experts: int, per_token: int, local: int) -> float:
    """The share of tokens with a choice among ``local`` of all experts, under equal loads.

    Args:
      experts: number of experts.
      per_token: number of different experts that a token chooses.
      local: such as the number of experts of a rank.
    """
    return 1 - math.comb(experts - local, per_token) / math.comb(experts, per_token)
