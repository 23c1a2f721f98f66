"""The flag that says how unequal the loads of experts are. Imports no JAX."""

from __future__ import annotations

import math

from mmjax.configurable import ConfigError
from mmjax.flags import Flag, Flags

FULLEST = Flag(
    name="fullest",
    doc="rows of the fullest rank of expert parallelism over their mean, such as 1.5; 1 means equal loads.",
    default="1",
)


def read_fullest(flags: Flags) -> float:
    """The number of --fullest, 1.0 without the flag; flags: the parsed command line.

    Raises:
      ConfigError: it is no number of 1 or more.
    """
    text = str(flags.values[FULLEST.name])
    try:
        fullest = float(text)
    except ValueError:
        fullest = math.nan
    if not 1 <= fullest < math.inf:
        raise ConfigError(f"--fullest={text}: must be 1 or more, the fullest rank's rows over their mean, such as 1.5")
    return fullest
