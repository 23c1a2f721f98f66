"""How far segments reach over ranks of cp, which bounds the distances over which blocks travel (see ``needed_blocks``).

A choice of transfers on a GPU makes the host wait for it. The host knows the segments of all rows, so it chooses, for a
microbatch, a program whose transfers are those of a reach. NumPy alone.

Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

DISTANCES = "transfer_distances"
"""The name under which the shapes of a module's inputs have the distances (see ``pipeline.place.InputShapes``)."""
REACH = "reach"
"""The name of a module's reach in signatures."""
SHORT = (0, 1, 2)
"""The reaches for which there are programs, beside the one of all ranks."""


def reaches(ranks: int) -> tuple[int, ...]:
    """The reaches for which there are programs, ascending: (0, 1, 2, 7) for eight ranks."""
    return tuple(sorted({min(reach, ranks - 1) for reach in (*SHORT, ranks - 1)}))


def reach_of(segments_BS: Int[np.ndarray, "B S"], ranks: int) -> int:
    """The least of ``reaches`` for rows: how many ranks are between the first and the last token of any segment.

    Args:
      segments_BS: the segment of each token of complete rows, in the order of the ranks; 0 is padding.
      ranks: the number of ranks; it divides S.
    """
    rank_S = np.arange(segments_BS.shape[1]) * ranks // segments_BS.shape[1]
    most = 0
    for segments_S in segments_BS:
        real = segments_S > 0
        first, last = (
            np.full(int(segments_S.max(initial=0)) + 1, ranks),
            np.zeros(int(segments_S.max(initial=0)) + 1, int),
        )
        np.minimum.at(first, segments_S[real], rank_S[real])
        np.maximum.at(last, segments_S[real], rank_S[real])
        most = max(most, int((last - first).max(initial=0)))
    return next(reach for reach in reaches(ranks) if reach >= most)


def distances(reach: int, ranks: int, *, backwards: bool) -> tuple[int, ...]:
    """The distances over which a rank receives blocks, ascending: from the rank before it by this much, modulo
    ``ranks``.

    For reach 2 of eight ranks (1, 2), or (1, 2, 6, 7) if tokens also see later ranks.

    Args:
      reach: one of ``reaches(ranks)``.
      ranks: the number of ranks.
      backwards: whether tokens see those of earlier ranks alone.
    """
    earlier = set(range(1, reach + 1))
    return tuple(sorted(earlier if backwards else earlier | {ranks - distance for distance in earlier}))
