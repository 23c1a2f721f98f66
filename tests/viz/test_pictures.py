"""Pictures: read back as pixels, so that colours, proportions and order are what was asked for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image, ImageColor

from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tasks.digits.task import Digits
from mmjax.viz.curves import draw_curves
from mmjax.viz.predictions import RIGHT, WRONG, Prediction, as_image, draw_predictions

MAGENTA, CYAN, YELLOW = (1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (1.0, 1.0, 0.0)
LOSS = "#3d6fb4"


def plain(height: int, width: int, color: tuple[float, ...]) -> np.ndarray:
    return np.broadcast_to(np.asarray(color, np.float32), (height, width, len(color))).copy()


def item(ok: bool = True, *images: np.ndarray, **texts: str) -> Prediction:
    values = {"question": "Read the image.", "answer": "42", "predicted": "42" if ok else "17", **texts}
    return Prediction(images=images, ok=ok, **values)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def near(path: Path, color: str | tuple[float, ...], tolerance: int = 6) -> np.ndarray:
    """[h, w] where the picture has this colour."""
    wanted = ImageColor.getrgb(color) if isinstance(color, str) else tuple(round(255 * part) for part in color)
    return np.asarray((abs(pixels(path) - np.asarray(wanted)) <= tolerance).all(-1))


def box(path: Path, color: str | tuple[float, ...]) -> tuple[int, int, int, int]:
    """Left, top, width and height of the pixels of a colour."""
    rows, columns = np.nonzero(near(path, color))
    return int(columns.min()), int(rows.min()), int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1


@pytest.mark.parametrize(("oks", "green", "red"), [([1, 1], True, False), ([0], False, True), ([1, 0], True, True)])
def test_right_is_green_and_wrong_is_red(tmp_path, oks, green, red):
    path = tmp_path / "new folder" / "predictions.png"
    draw_predictions([item(bool(ok), plain(8, 16, (1.0,))) for ok in oks], path)
    assert (near(path, RIGHT).sum() > 500) == green
    assert (near(path, WRONG).sum() > 500) == red
    assert list(path.parent.iterdir()) == [path]


def test_images_keep_their_proportions_and_order(tmp_path):
    path = tmp_path / "p.png"
    draw_predictions([item(True, plain(16, 24, MAGENTA), plain(16, 16, CYAN), plain(10, 80, YELLOW))], path)
    boxes = {name: box(path, color) for name, color in (("a", MAGENTA), ("b", CYAN), ("c", YELLOW))}
    for name, aspect in (("a", 1.5), ("b", 1.0), ("c", 8.0)):
        _, _, width, height = boxes[name]
        assert width / height == pytest.approx(aspect, rel=0.06)
    assert boxes["a"][0] + boxes["a"][2] < boxes["b"][0], "the second image is not right of the first"
    assert abs(boxes["a"][1] - boxes["b"][1]) <= 1
    assert boxes["c"][1] > boxes["a"][1] + boxes["a"][3], "the wide one starts a row of its own"


def test_cards_hold_together_where_a_notebook_crops_the_figure(tmp_path):
    figure = draw_predictions([item(True, plain(8, 8, MAGENTA))], tmp_path / "whole.png")
    figure.savefig(tmp_path / "cropped.png", dpi=150, bbox_inches="tight")
    assert pixels(tmp_path / "cropped.png").shape != pixels(tmp_path / "whole.png").shape
    gaps = []
    for name in ("whole.png", "cropped.png"):
        (left, top, _, _), (x, y, _, _) = (box(tmp_path / name, RIGHT), box(tmp_path / name, MAGENTA))
        gaps.append((x - left, y - top))
    assert gaps[1] == pytest.approx(gaps[0], abs=1.5)


def test_values_are_drawn_as_they_are(tmp_path):
    bytes_image = np.full((8, 8, 3), (255, 0, 255), np.uint8)
    draw_predictions([item(True, bytes_image)], tmp_path / "bytes.png")
    draw_predictions([item(True, plain(8, 8, MAGENTA))], tmp_path / "floats.png")
    assert near(tmp_path / "bytes.png", MAGENTA).sum() > 2000
    np.testing.assert_array_equal(pixels(tmp_path / "bytes.png"), pixels(tmp_path / "floats.png"))
    half = plain(8, 8, (0.5,))
    half[0, 0] = np.nan
    draw_predictions([item(True, half)], tmp_path / "grey.png")
    assert near(tmp_path / "grey.png", (0.5, 0.5, 0.5)).sum() > 2000


def test_a_wrong_answer_shows_the_right_one(tmp_path):
    draw_predictions([item(False, answer="42")], tmp_path / "a.png")
    draw_predictions([item(False, answer="99")], tmp_path / "b.png")
    assert (pixels(tmp_path / "a.png") != pixels(tmp_path / "b.png")).any()
    draw_predictions([item(True, answer="42", predicted="5")], tmp_path / "c.png")
    draw_predictions([item(True, answer="99", predicted="5")], tmp_path / "d.png")
    np.testing.assert_array_equal(pixels(tmp_path / "c.png"), pixels(tmp_path / "d.png"))


@pytest.mark.parametrize("text", ["", "$x$ \\frac{", "\x00\x07\ufffd", "word " * 200, "x" * 500, "数字 ✓ é", "a\nb"])
def test_any_text_is_drawn(tmp_path, text):
    path = tmp_path / "p.png"
    draw_predictions([item(False, question=text, predicted=text, answer=text)], path)
    picture = pixels(path)
    border = np.concatenate([picture[:, -20:].reshape(-1, 3), picture[-10:].reshape(-1, 3)])
    assert (border == 255).all(), "something runs over the edge of the sheet"


def test_the_sheet_grows_with_the_samples_up_to_the_limit(tmp_path):
    one = item(True, plain(8, 8, MAGENTA))
    sizes = {}
    for count in (1, 4, 30):
        draw_predictions([one] * count, tmp_path / "p.png", limit=6, columns=2)
        sizes[count] = near(tmp_path / "p.png", MAGENTA).sum()
    assert sizes[4] == pytest.approx(4 * sizes[1], rel=0.02) and sizes[30] == pytest.approx(6 * sizes[1], rel=0.02)


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 2), (0, 8, 3)])
def test_a_shape_that_is_no_image_is_refused(tmp_path, shape):
    with pytest.raises(ValueError, match="an image has shape"):
        draw_predictions([item(True, np.zeros(shape, np.float32))], tmp_path / "p.png")
    assert not list(tmp_path.iterdir())


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no predictions"):
        draw_predictions([], tmp_path / "p.png")


def test_curves_without_a_finite_loss_say_so(tmp_path):
    scores = [{"step": 1, "exact_match": 0.5}]
    figure = draw_curves([{"step": 1, "loss": None}], scores, tmp_path / "c.png", marks={1: "harder"})
    assert near(tmp_path / "c.png", "#59636e", 30).sum() > 100
    assert figure.axes[0].get_title(loc="left") == "held out: exact match 50.0%"


def test_the_loss_curve_goes_where_the_numbers_go(tmp_path):
    path = tmp_path / "c.png"
    draw_curves([{"step": step, "loss": 3.0 - step / 10} for step in range(1, 21)], (), path)
    line = near(path, LOSS, 12)
    rows, columns = np.nonzero(line[:, : int(0.92 * line.shape[1])])  # the last value's label stands beyond
    slope, height = np.polyfit(columns, rows, 1)
    assert slope > 0.2, "a falling loss does not fall"
    assert abs(rows - (slope * columns + height)).max() < 4, "the line through points of a line is none"


def test_evaluations_add_a_second_plot_and_gaps_are_skipped(tmp_path):
    rows = [{"step": step, "loss": None if step == 40 else 3.0 * 0.95**step} for step in range(1, 100)]
    draw_curves(rows, (), tmp_path / "loss.png", title="run $1")
    evaluations = [
        {"step": 10, "exact_match": 0.1, "digit_accuracy": 0.3},
        {"step": 90, "exact_match": 0.9, "digit_accuracy": 0.9, "kind": "held out"},
    ]
    draw_curves(rows, evaluations, tmp_path / "both.png")
    assert pixels(tmp_path / "both.png").shape[0] > 1.5 * pixels(tmp_path / "loss.png").shape[0]
    for color in (RIGHT, "#c77d0a"):
        assert near(tmp_path / "both.png", color).sum() > 300
        assert near(tmp_path / "loss.png", color).sum() == 0


def test_a_single_evaluation_is_a_line_of_text_and_a_curriculum_is_marked(tmp_path):
    """Three dots had a panel to themselves, and a loss that rises had no reason."""
    rows = [{"step": step, "loss": 2.0 + (step > 12) - step / 20} for step in range(1, 21)]
    draw_curves(rows, [{"step": 20, "read": 0.9, "count": 0.5}], tmp_path / "one.png")
    figure = draw_curves(rows, (), tmp_path / "marked.png", marks={1: "no", 13: "up to 3 digits", 99: "later"})
    assert pixels(tmp_path / "one.png").shape == pixels(tmp_path / "marked.png").shape, "a second panel"
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert "up to 3 digits" in texts and not {"no", "later"} & {*texts}
    config = DigitsConfig(curriculum=((0, 1), (96, 2), (128, 9)), digits=(1, 4))
    assert Digits(config).changes(32) == {4: "up to 2 digits", 5: "up to 4 digits"}


def test_drawing_leaves_pyplot_and_other_formats_alone(tmp_path):
    draw_curves([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], (), tmp_path / "c.svg")
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")
    code = (
        "import sys, mmjax.viz.curves, mmjax.viz.predictions\n"
        "sys.exit('matplotlib.pyplot' in sys.modules or 'jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_recording_is_drawn_as_its_spectrogram() -> None:
    frames = np.zeros((6, 4), np.float32)
    frames[1, 3] = 2.0  # the second frame, the highest pitch
    picture = as_image(frames)
    assert picture.shape == (4, 6, 3) and picture.dtype == np.float32
    assert np.unravel_index(picture.sum(-1).argmax(), (4, 6)) == (0, 1)
    assert (as_image(frames + 5) == picture).all(), "loudness is relative"
    image = np.zeros((2, 3, 1), np.float32)
    assert as_image(image) is image and as_image(np.ones((3, 2), np.float32)).shape == (2, 3, 3)


def test_a_normalised_image_has_the_colours_that_it_had() -> None:
    """And is not stretched over all of them."""
    image = np.random.default_rng(0).uniform(0.2, 0.6, (4, 5, 3)).astype(np.float32)
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    normalised = (image - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    np.testing.assert_allclose(as_image(normalised, mean, std), image, atol=1e-6)


def test_without_a_model_nothing_is_right_or_wrong(tmp_path):
    """Nor where a sample cannot be read, whose picture is a crossed frame and not black."""
    shown = [item(ok, plain(8, 8, MAGENTA)) for ok in (True, False)]
    draw_predictions([replace(one, predicted=None) for one in shown], tmp_path / "given.png", title="training samples")
    broken = replace(shown[0], images=(None, plain(8, 8, MAGENTA)), broken="7.png: no image")
    draw_predictions([broken], tmp_path / "broken.png")
    for name in ("given.png", "broken.png"):
        assert not near(tmp_path / name, RIGHT).any() and not near(tmp_path / name, WRONG).any()
        assert near(tmp_path / name, MAGENTA).sum() > 1000
    # The frame, with a line through it, is all there is of the colour of lines beyond the card's own edge.
    draw_predictions([replace(broken, images=(plain(8, 8, MAGENTA),))], tmp_path / "other.png")
    lines = [(near(tmp_path / name, "#d1d9e0")).sum() for name in ("broken.png", "other.png")]
    assert lines[0] > lines[1] + 300
    assert (pixels(tmp_path / "broken.png").max(axis=2) < 20).sum() < 3000, "a black picture"
    draw_predictions([broken, *shown], tmp_path / "mixed.png")
    assert near(tmp_path / "mixed.png", RIGHT).any() and near(tmp_path / "mixed.png", WRONG).any()


def test_the_held_out_loss_is_drawn_beside_the_loss_and_not_among_accuracies(tmp_path):
    rows = [{"step": step, "loss": 3.0 - step / 10} for step in range(1, 21)]
    found = [{"step": step, "exact_match": 0.5, "loss": 2.0, "perplexity": 7.4} for step in (10, 20)]
    draw_curves(rows, [*found, {"step": 20, "failure": "no memory"}], tmp_path / "c.png")
    rows_, _ = np.nonzero(near(tmp_path / "c.png", "#b4513d", 12))
    height = pixels(tmp_path / "c.png").shape[0]
    assert len(rows_) > 300 and rows_.max() < 0.5 * height


LONG = ("W" * 300, "MMMM " * 60, "il" * 300, "数字" * 90, "a question, of several words, that is asked " * 6, "7", "")


def within(inner, outer, slack: float = 0.5) -> bool:
    """Whether a box lies in another, up to half a pixel."""
    return (
        inner.x0 >= outer.x0 - slack
        and inner.x1 <= outer.x1 + slack
        and inner.y0 >= outer.y0 - slack
        and inner.y1 <= outer.y1 + slack
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Glyph")
def test_texts_lie_in_their_cards_cards_in_rows_and_titles_in_the_figure(tmp_path):
    """Lines were as many characters long, whatever these are; cards went under the shortest column."""
    texts = [*LONG, *LONG[:3]]
    items = [
        item(number % 2 == 0, *[plain(8, 16 * (1 + number % 3), MAGENTA)] * (number % 4), question=text, answer=text)
        for number, text in enumerate(texts)
    ]
    items = [replace(one, predicted=one.answer[:-1]) for one in items]
    items[-2:] = replace(items[-2], predicted=None), replace(items[-1], broken=texts[-1])
    for title in ("step 3", *LONG[:5]):
        figure = draw_predictions(items, tmp_path / "p.png", columns=3, title=title)
        renderer = FigureCanvasAgg(figure).get_renderer()
        cards = [artist.get_window_extent(renderer) for artist in figure.artists]
        tops = [round(card.y1) for card in cards]
        assert [tops.count(top) for top in sorted(set(tops), reverse=True)] == [3, 3, 3, 1]
        assert sorted(tops, reverse=True) == tops, "cards are not in the order of the samples"
        assert len({round(card.x0) for card in cards}) == 3
        for text in figure.texts:
            box = text.get_window_extent(renderer)
            assert within(box, figure.bbox), text.get_text()
            homes = [card for card in cards if card.y0 < (box.y0 + box.y1) / 2 < card.y1 and card.x0 < box.x0 < card.x1]
            assert len(homes) == (box.y1 < max(tops)), text.get_text()
            assert all(within(box, card) for card in homes), text.get_text()
        assert sum(text.get_text().endswith("of 8 right") for text in figure.texts) == 1


@pytest.mark.parametrize("title", LONG[:5])
@pytest.mark.filterwarnings("ignore:Glyph")
def test_titles_and_marks_of_curves_lie_in_the_figure(tmp_path, title):
    rows = [{"step": step, "loss": 3.0 - step / 10} for step in range(1, 21)]
    scores = [{"step": 20, **{f"{'long ' * 6}name {number}": 0.5 for number in range(9)}}]
    figure = draw_curves(rows, scores, tmp_path / "c.png", title=title, marks={2: title, 11: title, 19: title})
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and len(text.get_text()) > 5]
    assert len(texts) == 5, "a title, the scores and three marks"
    for text in texts:
        assert within(text.get_window_extent(renderer), figure.bbox), text.get_text()
