"""The language of masks: what lines mean, what is wrong with others, and the words of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from mmjax.attention.language import KINDS, MAX_RULES, PRESETS, Rules
from mmjax.attention.mask import Mask
from mmjax.attention.pairs import pairs_of
from mmjax.configurable import ConfigError

# Two samples: an image, text, a recording, another image, an answer; and text with an answer.
TEXTS = "vvttaavvss ttss"
LINES = {name: text for name, text in PRESETS.items()} | {
    "modality to modality": "all sees all before; vision sees audio everywhere"
}
SEEN = {
    "causal": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4],
    "full": [10] * 10 + [4] * 4,
    "cornstarch": [2, 2, 3, 4, 2, 2, 2, 2, 9, 10, 1, 2, 3, 4],
    "gemma3": [2, 2, 3, 4, 6, 6, 8, 8, 9, 10, 1, 2, 3, 4],
    "paligemma": [8] * 8 + [9, 10] + [2, 2, 3, 4],
    "qwen-omni": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4],
    "modality to modality": [3, 4, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4],
}


def inputs_of(rules: Rules) -> dict[str, np.ndarray]:
    """Host inputs of the two samples, packed in a row."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("segments", "is", "attends", "items")}
    for number, text in enumerate(TEXTS.split(), 1):
        letters = np.array(list(text))
        kinds = {name: letters == name[0] for name in ("vision", "audio")}
        media = kinds["vision"] | kinds["audio"]
        suffix = letters == "s"
        kinds |= {"all": letters != "", "text": ~media, "media": media, "suffix": suffix, "prefix": ~suffix}
        items = np.cumsum(media & (np.append("", letters[:-1]) != letters)) * media
        words = rules.words(kinds, items)
        for name, values in zip(found, (np.full(len(letters), number), *words, items), strict=True):
            found[name].append(values)
    return {name: np.concatenate(values) for name, values in found.items()}


@pytest.mark.parametrize("name", LINES)
def test_a_line_says_who_sees_whom(name: str) -> None:
    rules = Rules.parse(LINES[name])
    rules.require_kinds(["vision", "audio"], "Decoder.mask", name)
    assert pairs_of(Mask.of(rules), inputs_of(rules)).key_counts().tolist() == SEEN[name]
    assert Rules.parse(name if name in PRESETS else LINES[name]) == rules


def test_plain_masks_have_no_words() -> None:
    for name, kind in {
        "causal": "causal",
        "full": "full",
        "qwen-omni": "causal",
        "all see all before": "causal",
    }.items():
        assert Mask.of(name) == Mask(kind)  # pyright: ignore[reportArgumentType]
    assert Mask.of("full", window=5) == Mask("full") and Mask.of("causal", 5) == Mask("causal", 5)
    assert Mask.of("gemma3", 5) == Mask("words", 5, 0, ("before", "in item"), words_show_intervals=True)
    assert Mask("causal").input_names == ("segments", "order")
    assert Mask.of("gemma3").input_names == ("segments", "order", "is", "attends", "items")


def test_spelling_is_free() -> None:
    one = Rules.parse("text and audio sees all before; vision, depth see vision,depth in item;")
    assert one == Rules.parse(" text, audio see  all before;vision and depth sees vision and depth in item")
    assert [str(rule) for rule in one.rules] == [
        "text and audio sees all before",
        "vision and depth sees vision and depth in item",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("causl", "Decoder.mask='causl': did you mean 'causal'?"),
        ("triangle", "Decoder.mask='triangle': use one of causal, full,"),
        ("", "Decoder.mask='': has no rule; write 'causal'"),
        ("text ses all before", "'text ses all before' does not say who sees whom, did you mean 'sees' by 'ses'?"),
        ("text sees all befor", "'text sees all befor' ends in 'befor'; did you mean 'before'?"),
        (
            "text sees before",
            "'text sees before' is incomplete: write who sees whom, and one of before, everywhere, in item",
        ),
        ("text sees all before vision sees vision in item", "'all before vision sees vision'"),
        ("te-xt sees all before", "'te-xt' in 'te-xt sees all before' is no kind of token"),
        ("; ".join(["text sees all before"] * (MAX_RULES + 1)), "has 33 rules; a mask has 32 at most"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Rules.parse(text, "Decoder.mask")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_unknown_kinds_have_near_names() -> None:
    rules = Rules.parse("text sees visoin before")
    with pytest.raises(ConfigError, match="no tokens are 'visoin'; did you mean 'vision'"):
        rules.require_kinds(["vision"], "Decoder.mask", "…")
    Rules.parse("text sees audio before").require_kinds(["audio"], "Decoder.mask", "…")
    assert "audio" not in KINDS


def test_words_of_generated_text() -> None:
    rules = Rules.parse("prefix sees prefix everywhere; suffix sees all before; text sees text in item")
    assert rules.generated == {"is": 0b010, "attends": 0b110} and rules.shows_later is None
    assert str(Rules.parse("full").shows_later) == "all sees all everywhere"


def test_a_mask_is_checked() -> None:
    with pytest.raises(ValueError, match="window=3: a mask that is 'words' has none"):
        Mask("words", 3, relations=("everywhere",))
    with pytest.raises(ValueError, match="relations="):
        Mask("words")
    with pytest.raises(ValueError, match="relations="):
        Mask("causal", relations=("before",))
