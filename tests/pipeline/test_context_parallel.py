"""Context parallelism in any module, by every way and distribution, against the dense reference: see `test_parity`.

Cases are grouped by the layouts of encoder and LLM, `1→2` being an encoder of cp 1 and an LLM of cp 2.
"""

from __future__ import annotations

from dataclasses import replace

import parity
import pytest
from parity import Case
from test_parity import assert_equal_to_reference

from mmjax.mesh.layout import Layout

LLM = Case(vision=Layout(dp=2, rank_offset=4), llm=Layout(cp=2, tp=2), clip_norm=0.7)
VISION = Case(vision=Layout(cp=2, dp=2, rank_offset=4), llm=Layout(dp=2, tp=2))
BOTH = Case(vision=Layout(cp=4), llm=Layout(dp=2, cp=2), model="tied")
ODD = Case(vision=Layout(cp=3), llm=Layout(cp=2, pp=2, rank_offset=4), model="families", clip_norm=0.7)
PIPELINE = Case(vision=Layout(dp=2, rank_offset=4), llm=Layout(cp=2, pp=2), model="tied", clip_norm=0.7)
SAME = Case(vision=Layout(dp=4), llm=Layout(cp=2, dp=2))
CHUNKED = Case(
    model="chunked and tied",
    vision=Layout(pp=2, cp=2, rank_offset=4),
    llm=Layout(pp=2, chunks=2, cp=2),
    microbatches=4,
    samples=25,
)
DRAWING = Case(
    model="drawing",
    vision=Layout(dp=2, rank_offset=4),
    llm=Layout(cp=2, dp=2),
    painter=Layout(cp=2, rank_offset=6),
)
NESTED = Case(
    model="deep",
    vision=Layout(lanes=2, cp=2),
    llm=Layout(pp=2, cp=2),
    schedule="nested",
    microbatches=4,
    samples=25,
)

THREE_PHASES = replace(
    CHUNKED, model="plain", vision=Layout(cp=2, dp=2, rank_offset=4), llm=Layout(cp=2, pp=2), schedule="three-phase"
)


def over(case: Case, way: str, tokens: str = "lpt") -> Case:
    """The case with another way and distribution."""
    changed = {
        name: replace(getattr(case, name), cp_way=way, cp_tokens=tokens) for name in ("vision", "llm", "painter")
    }
    return replace(case, **changed)


FAST = {
    "1→2, need": over(LLM, "need", "contiguous"),
}
LONG = {
    "2→2, ring, three phases": over(THREE_PHASES, "ring"),
    "2→2, three phases": THREE_PHASES,
    "2→4, ring": over(Case(vision=Layout(cp=2, dp=2), llm=Layout(cp=4)), "ring"),
    "2→1": VISION,
    "1→3": Case(vision=Layout(dp=2, rank_offset=6), llm=Layout(cp=3, pp=2)),
    "1→2, all-to-all": over(LLM, "all-to-all"),
    "1→2, zb-h1": replace(PIPELINE, schedule="zb-h1", remat="dots", microbatches=3),
    "2→1, fan-out": Case(vision=Layout(cp=2, tp=2), llm=Layout(dp=4, rank_offset=4)),
    "2→1, need, whole media": over(VISION, "need", "segments"),
    "3→2, pp, windows": ODD,
    "4→2, ring, tied, one program": over(BOTH, "ring", "zigzag"),
    "1→2→2, masks of words": replace(DRAWING, model="masked, prefix"),
    "2→2, nested": NESTED,
}
SLOW = {
    "1→2, tp": LLM,
    "3→2, need, pp, windows": over(ODD, "need", "contiguous"),
    "2→1, need": over(VISION, "need", "contiguous"),
    "2→3, need, masks of words": over(
        Case(model="masked", vision=Layout(cp=2, rank_offset=6), llm=Layout(cp=3, pp=2), clip_norm=0.7),
        "need",
        "contiguous",
    ),
    "4→2, need, remat full": replace(over(BOTH, "need", "contiguous"), remat="full"),
    "1→2, need, lpt": over(SAME, "need"),
    "1→2, need, zb-h1, remat dots": replace(
        over(PIPELINE, "need", "contiguous"), schedule="zb-h1", remat="dots", microbatches=3
    ),
    "1→2→2, need, prefixes": over(replace(DRAWING, model="masked, prefix"), "need", "contiguous"),
    "4→2, whole segments": over(BOTH, "gather", "segments"),
    "1→2→2, need, whole segments": over(DRAWING, "need", "segments"),
    "2→3, need, whole segments, masks of words": over(
        Case(model="masked", vision=Layout(cp=2, rank_offset=6), llm=Layout(cp=3, pp=2), clip_norm=0.7),
        "need",
        "segments",
    ),
    "2→2, need, nested": over(NESTED, "need", "contiguous"),
    "1→2→2": DRAWING,
    "2→3, masks of words, ring": over(
        Case(model="masked", vision=Layout(cp=2, rank_offset=6), llm=Layout(cp=3, pp=2), clip_norm=0.7), "ring"
    ),
    "1→2, ring": over(LLM, "ring"),
    "1→2, contiguous": over(LLM, "gather", "contiguous"),
    "1→2, striped": over(LLM, "ring", "striped"),
    "1→2, random": over(LLM, "gather", "random"),
    "1→2, collective": replace(LLM, transport="collective"),
    "1→2, sliced": replace(LLM, route="sliced"),
    "1→2, sliced, collective": replace(LLM, route="sliced", transport="collective"),
    "1→2, remat full": replace(LLM, remat="full"),
    "1→2, llm frozen": replace(LLM, frozen=("llm",)),
    "1→2, projector alone": replace(LLM, frozen=("vision", "llm"), clip_norm=0.0),
    "1→2, no images at all": replace(LLM, text_only=13, clip_norm=0.0),
    "1→2, same ranks": SAME,
    "1→2, same ranks, program per op": replace(SAME, lowering="ops"),
    "1→2, pp, 1f1b": PIPELINE,
    "1→2, pp, sliced": replace(PIPELINE, route="sliced", transport="collective"),
    "1→2, single": replace(PIPELINE, vision=Layout(dp=4), lowering="single", microbatches=3, samples=17),
    "2→2, single": replace(
        PIPELINE, vision=Layout(cp=2), lowering="single", microbatches=3, samples=17, schedule="gpipe"
    ),
    "1→5": Case(vision=Layout(dp=2, rank_offset=5), llm=Layout(cp=5)),
    "1→8": Case(vision=Layout(dp=8), llm=Layout(cp=8)),
    "2→1, ring": over(VISION, "ring", "zigzag"),
    "2→1, all-to-all": over(VISION, "all-to-all"),
    "2→1, sliced": replace(VISION, route="sliced"),
    "2→1, vision frozen": replace(VISION, frozen=("vision",)),
    "2→1, fan-in": Case(vision=Layout(cp=2, dp=2), llm=Layout(tp=2, rank_offset=4)),
    "2→1, dp 2 to 3": Case(vision=Layout(cp=2, dp=2), llm=Layout(dp=3, rank_offset=4)),
    "2→2, same ranks": Case(vision=Layout(cp=2, dp=2), llm=Layout(cp=2, dp=2)),
    "2→2, dp 1 to 2": Case(vision=Layout(cp=2, rank_offset=4), llm=Layout(cp=2, dp=2), route="sliced"),
    "2→3": Case(vision=Layout(cp=2, rank_offset=6), llm=Layout(cp=3, tp=2), clip_norm=0.7),
    "2→4": Case(vision=Layout(cp=2, dp=2), llm=Layout(cp=4)),
    "3→2, zb-h1": replace(ODD, schedule="zb-h1", microbatches=3),
    "3→2, ring": over(ODD, "ring", "striped"),
    "4→2": BOTH,
    "4→2, program per op": replace(BOTH, lowering="ops"),
    "4→2, all-to-all in the llm": replace(BOTH, llm=Layout(dp=2, cp=2, cp_way="all-to-all")),
    "4→2, adapters": replace(BOTH, model="adapted", frozen=("vision", "llm")),
    "4→2, adapters, zb-h1": replace(PIPELINE, model="adapted, tied", schedule="zb-h1", clip_norm=0.0),
    "4→2, unrolled": replace(BOTH, unroll=True, remat="dots"),
    "4→2, callbacks": replace(BOTH, model="marked"),
    "2→2, injected": Case(model="injected", vision=Layout(cp=2), llm=Layout(cp=2, pp=2, rank_offset=2)),
    "2→2, levels": Case(model="levels", vision=Layout(cp=2, pp=3), llm=Layout(cp=2, rank_offset=6), schedule="zb-h1"),
    "2→2, learned positions": Case(model="learned", vision=Layout(cp=2), llm=Layout(cp=2)),
    "2→2, two encoders": Case(model="two", vision=Layout(cp=2, rank_offset=4), llm=Layout(cp=2, tp=2), text_only=7),
    "2→2, optimizer instances": Case(
        vision=Layout(cp=2, dp=4, optimizer_instances=2), llm=Layout(cp=2, dp=4, optimizer_instances=4), clip_norm=0.7
    ),
    "2→2, chunks": CHUNKED,
    "2→2, chunks, interleaved": replace(CHUNKED, schedule="interleaved"),
    "1→2, nested": replace(NESTED, vision=Layout(lanes=2, dp=2)),
    "2→1, nested, zb-h1": replace(NESTED, llm=Layout(pp=2, dp=2), inner="zb-h1"),
    "2→2, copies": Case(vision=Layout(copies=2, cp=2), llm=Layout(pp=2, cp=2), model="deep"),
    "2→2, nested, stashed": replace(NESTED, stash=True),
    "2→1→2": replace(DRAWING, vision=Layout(cp=2, rank_offset=4), llm=Layout(dp=2, tp=2)),
    "2→2→1": replace(DRAWING, vision=Layout(cp=2, rank_offset=4), painter=Layout(dp=2, rank_offset=6)),
    "1→2→3": replace(
        DRAWING, vision=Layout(rank_offset=4), llm=Layout(cp=2, pp=2), painter=Layout(cp=3, rank_offset=5)
    ),
    "1→2, dp 3 to 2": Case(vision=Layout(dp=3, rank_offset=4), llm=Layout(cp=2, dp=2)),
    "1→2, dp 4 to 2, sliced": Case(vision=Layout(dp=4, rank_offset=4), llm=Layout(cp=2, dp=2), route="sliced"),
    "1→2, lists in one bucket": replace(
        LLM, buckets=((2, 16), (6, 32)), microbatches=4, samples=25, text_only=7, clip_norm=0.0
    ),
    "buckets": replace(LLM, buckets=((2, 16), (3, 32), (4, 32)), microbatches=4, samples=25, clip_norm=0.0),
}
CASES = [
    *(pytest.param(case, id=name) for name, case in FAST.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_dense_reference(case: Case) -> None:
    assert_equal_to_reference(parity.run(case), parity.expected(case), case)
