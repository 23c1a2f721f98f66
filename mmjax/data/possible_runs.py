"""The numbers of runs that rows of a bucket may have, from bounds on the samples (see `attention.row_runs`)."""

from __future__ import annotations

from mmjax.attention.row_runs import ANY_RUNS, MAX_PACKED_RUNS
from mmjax.data.packing import Packer


def possible_runs(
    packer: Packer, module: str, bucket: tuple[int, int], *, samples: int, causal: bool
) -> tuple[int, ...]:
    """The values of `max_runs` for which programs of a bucket are compiled, the narrowest first; the last includes all.

    These are few: whole rows have a program of their own only where other rows cannot occur, or where every medium has
    a row and may fill it.

    Args:
      packer: packs the rows.
      module: "llm", or the name of an encoder or generator.
      bucket: (rows per cell, positions per row).
      samples: the most samples of a cell.
      causal: whether the module's mask is causal; else it is full.
    """
    rows, width = bucket
    if module == "llm":
        apart = not packer.text  # each sample has a row
        return _packed(1, 1, causal=causal) if apart else _packed(samples, rows, causal=causal)
    spec, worst = packer.encoders[module], packer.worst
    if spec.prefix != spec.special and not causal:  # padding inside of segments
        return (ANY_RUNS,)
    if not worst:
        return (MAX_PACKED_RUNS, ANY_RUNS)
    media, least = samples * worst.media.get(module, 0), worst.least.get(module)
    if least is None:
        packed = _packed(media, rows, causal=causal)
        return (1, *packed) if media <= rows and packed != (1,) else packed
    if spec.prefix + least == width:
        return (1,)
    if spec.canvases:  # padding behind each line of a picture
        return (ANY_RUNS,)
    most = 1 if spec.queries else width // (spec.prefix + least)
    return _packed(min(media, rows * most), rows, causal=causal, alone=most <= 1)


def _packed(segments: int, rows: int, *, causal: bool, alone: bool = False) -> tuple[int, ...]:
    """The numbers for at most so many segments in so many rows; ``alone``: never two in one row."""
    if causal and (alone or segments <= 1):  # padding behind a segment is hidden
        return (1,)
    runs = max(2, -(-(segments + rows) // rows))
    return (runs,) if runs <= MAX_PACKED_RUNS else (MAX_PACKED_RUNS, ANY_RUNS)
