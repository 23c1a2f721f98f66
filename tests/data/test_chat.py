"""Templates: what is around the turns, where media go, and that answers alone are learned."""

from __future__ import annotations

import pytest

from mmjax.configurable import ConfigError
from mmjax.data.chat import TEMPLATES, Template
from mmjax.data.sample import layout_tokens
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.data.types import EncoderSpec

ENCODERS = {"vision": EncoderSpec(patch=4), "audio": EncoderSpec(patch=1, axes=1)}
TOKENIZER = ByteTokenizer(tuple(ENCODERS))
MARKS = {TOKENIZER.media_token("vision"): "▣", TOKENIZER.media_token("audio"): "♪", TOKENIZER.eos: "$"}


def shown(tokens: list[int]) -> str:
    """One character for each token."""
    assert tokens[0] == TOKENIZER.bos
    return "".join(MARKS.get(token) or chr(token) for token in tokens[1:])


def laid(turns, template="plain", system="", **counts):
    tokens, weights, prompt = layout_tokens(
        TOKENIZER, ENCODERS, counts, turns, template=TEMPLATES[template], system=system
    )
    assert len(tokens) == len(weights) and weights[0] == 0
    learned = "".join(c for c, weight in zip(shown(tokens), weights[1:], strict=True) if weight)
    return shown(tokens), learned, shown(tokens[:prompt])


TURNS = (("<image>hi", "yo"), ("and?", "so"))


@pytest.mark.parametrize(
    ("template", "system", "text", "learned", "prompt"),
    [
        ("plain", "", "▣▣hi yo$and? so$", "yo$so$", "▣▣hi yo$and? "),
        ("plain", "be", "be ▣▣hi yo$and? so$", "yo$so$", "be ▣▣hi yo$and? "),
        (
            *("vicuna", "be", "be USER: ▣▣hi ASSISTANT: yo$USER: and? ASSISTANT: so$", "yo$so$"),
            "be USER: ▣▣hi ASSISTANT: yo$USER: and? ASSISTANT: ",
        ),
        (
            *("chatml", "", "<|im_start|>user\n▣▣hi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"),
            *("yo<|im_end|>\nso<|im_end|>\n$", ""),
        ),
        ("llama2", "", "[INST] ▣▣hi [/INST] yo $[INST] and? [/INST] so $", "yo $so $", ""),
    ],
)
def test_templates(template, system, text, learned, prompt):
    got = laid(TURNS, template, system, vision=[2])
    assert got[0].startswith(text) and got[1] == learned and got[0].startswith(got[2])
    assert not prompt or (got[0], got[2]) == (text, prompt)


def test_media_are_where_their_marks_are_in_any_turn_and_never_learned():
    turns = (("a<image>b", "c<image>d"), ("e<recording>f<image>", "g"))
    text, learned, _ = laid(turns, vision=[1, 2, 1], audio=[3])
    assert (text, learned) == ("a▣b c▣▣d$e♪♪♪f▣ g$", "cd$g$")


def test_media_without_marks_come_first_with_numbers():
    assert laid((("q<image>", "a"),), vision=[1, 2], audio=[1])[0] == "1:▣2:♪q▣▣ a$"
    assert laid((("q", "a"),), "vicuna", vision=[1, 1])[0] == "USER: 1:▣2:▣q ASSISTANT: a$"


def test_marks_of_absent_encoders_and_braces_are_text():
    assert laid((("{text}{eos}<recording>", "{eos}"),), vision=[])[:2] == ("{text}{eos}<recording> {eos}$", "{eos}$")
    with pytest.raises(ValueError, match="2 <image> marks for 1 images"):
        laid((("<image>", "<image>"),), vision=[1])


def test_a_template_of_ones_own():
    own = Template().changed("Source.pieces", {"question": "Q: {text}\n", "answer": "A: {text}\n"})
    tokens, _, _ = layout_tokens(TOKENIZER, ENCODERS, {}, (("x", "y"),), template=own)
    assert shown(tokens) == "Q: x\nA: y\n$"
    with pytest.raises(ConfigError, match=r"a template has no 'asnwer'; did you mean 'answer'"):
        own.changed("Source.pieces", {"asnwer": "{text}"})
    with pytest.raises(ConfigError, match=r"Source\.pieces\['answer'\]='A': must have \{text\} once"):
        own.changed("Source.pieces", {"answer": "A"})
