"""The layout picture, read back from the figure: which boxes are where."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from mmjax.mesh.layout import Layout
from mmjax.viz.layout import draw_layout

APART = {"llm": Layout(tp=2, pp=2), "vision": Layout(dp=4, rank_offset=4)}


def texts(figure: Figure) -> dict[tuple[int, int], str]:
    """Text of each box by row and rank; a frame's name has a dot, and is left out."""
    found = [(text.get_position(), text.get_text()) for text in figure.axes[0].texts]
    return {(round(y), round(x)): text for (x, y), text in found if "." not in text}


def frames(figure: Figure) -> list[tuple[int, int, int]]:
    """Row, first and last rank of each stage's frame."""
    found = [p for p in patches(figure) if to_hex(p.get_facecolor(), keep_alpha=True).endswith("00")]
    ends = [(p.get_x() + 0.48, p.get_x() + p.get_width() - 0.48) for p in found]
    return [(round(p.get_y() + 0.42), round(first), round(last)) for p, (first, last) in zip(found, ends, strict=True)]


def patches(figure: Figure) -> list[FancyBboxPatch]:
    """Frames and boxes."""
    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]


def test_every_rank_has_its_part() -> None:
    figure = draw_layout(APART)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["vision\ndp=4", "llm\npp=2 · tp=2"]  # the LLM below what feeds it
    parts = {place: text for place, text in texts(figure).items()}
    assert parts == {(0, r): f"dp {r - 4}" for r in range(4, 8)} | {(1, r): f"tp {r % 2}" for r in range(4)}
    assert frames(figure) == [(0, 4, 7), (1, 0, 1), (1, 2, 3)]


def test_a_frame_names_all_stages_of_its_submesh() -> None:
    figure = draw_layout({"vision": Layout(rank_offset=4), "llm": Layout(tp=2, pp=2, chunks=3)})
    names = {text.get_text() for text in figure.axes[0].texts if "." in text.get_text()}
    assert names == {"vision.0", "llm.0, 2, 4", "llm.1, 3, 5"}
    assert frames(figure) == [(0, 4, 4), (1, 0, 1), (1, 2, 3)]


def test_copies_and_lanes_are_numbered() -> None:
    figure = draw_layout({"vision": Layout(copies=2, dp=2), "audio": Layout(lanes=2, tp=2)})
    assert [texts(figure)[0, rank] for rank in range(4)] == [f"copy {k}\ndp {d}" for k in range(2) for d in range(2)]
    assert [texts(figure)[1, rank] for rank in range(4)] == [f"lane {k}\ntp {t}" for k in range(2) for t in range(2)]


def test_indices_follow_the_order_of_ranks() -> None:
    figure = draw_layout({"llm": Layout(dp=2, cp=2, tp=2, pp=2, rank_offset=3)})
    parts = {rank: text for (_, rank), text in texts(figure).items()}
    assert sorted(parts) == list(range(3, 19))
    for rank, text in parts.items():
        dp, cp, tp = ((rank - 3) % 8) >> 2, ((rank - 3) % 4) >> 1, (rank - 3) % 2
        assert text == f"dp {dp}\ncp {cp}\ntp {tp}"


def test_colours_are_those_of_the_timeline_and_idle_ranks_are_grey() -> None:
    figure = draw_layout(APART)
    boxes = [p for p in patches(figure) if to_hex(p.get_facecolor(), keep_alpha=True).endswith("ff")]
    by_colour: dict[str, set[tuple[int, int]]] = {}
    for box in boxes:
        place = round(box.get_y() + 0.36), round(box.get_x() + 0.42)
        by_colour.setdefault(to_hex(box.get_facecolor()), set()).add(place)
    assert by_colour.pop("#f1f2f4") == {(0, r) for r in range(4)} | {(1, r) for r in range(4, 8)}
    assert sorted(map(sorted, by_colour.values())) == [[(0, r) for r in range(4, 8)], [(1, r) for r in range(4)]]


def test_a_large_world_stays_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "new" / "layout.png"
    figure = draw_layout({"vision": Layout(dp=128, rank_offset=128), "llm": Layout(tp=8, pp=4, dp=4)}, path)
    assert figure.get_size_inches()[0] == 40
    with Image.open(path) as image:
        assert image.width > 2000
    assert not texts(figure), "text without room"


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="no layouts"):
        draw_layout({})
