"""Templates: what is around the turns, where media go, that answers alone are learned, and that they can be read back.

Published texts are what transformers 5.23 renders of the templates that are published with the models: Llama 2's,
TRL's ChatML; and FastChat's prompt for Vicuna.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmjax.configurable import ConfigError
from mmjax.data.chat import TEMPLATES, Template
from mmjax.data.sample import EncodedDialogue, answer_text, encode_dialogue
from mmjax.data.tokenizer import ByteTokenizer, FileTokenizer, make_tokenizer
from mmjax.data.types import EncoderSpec, Sample

ENCODERS = {"vision": EncoderSpec(patch=4), "audio": EncoderSpec(patch=1, axes=1)}
TOKENIZER = ByteTokenizer(tuple(ENCODERS))
MARKS = {TOKENIZER.media_token("vision"): "▣", TOKENIZER.media_token("audio"): "♪", TOKENIZER.eos: "$"}
MARKS |= {TOKENIZER.bos: "^"}


def shown(tokens: list[int]) -> str:
    """One character for each token behind the first."""
    assert tokens[0] == TOKENIZER.bos
    return "".join(MARKS.get(token) or chr(token) for token in tokens[1:])


def laid(turns, template="plain", system="", **counts):
    dialogue = encode_dialogue(TOKENIZER, ENCODERS, counts, turns, template=TEMPLATES[template], system=system)
    tokens, weights = dialogue.tokens, dialogue.weights
    assert len(tokens) == len(weights) and weights[0] == 0
    learned = "".join(c for c, weight in zip(shown(tokens), weights[1:], strict=True) if weight)
    return shown(tokens), learned, shown(tokens[: dialogue.prompt])


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
        ("llama2", "", "[INST] ▣▣hi [/INST] yo $^[INST] and? [/INST] so $", "yo $so $", ""),
        (
            *("llama2", "be", "[INST] <<SYS>>\nbe\n<</SYS>>\n\n▣▣hi [/INST] yo $^[INST] and? [/INST] so $"),
            *("yo $so $", "[INST] <<SYS>>\nbe\n<</SYS>>\n\n▣▣hi [/INST] yo $^[INST] and? [/INST] "),
        ),
    ],
)
def test_templates(template, system, text, learned, prompt):
    got = laid(TURNS, template, system, vision=[2])
    assert got[0].startswith(text) and got[1] == learned and got[0].startswith(got[2])
    assert not prompt or (got[0], got[2]) == (text, prompt)


SYSTEM, SAID = "be kind", (("what is there?", "a cat"), ("what else?", "nothing"))
PUBLISHED = {
    "llama2": "<s>[INST] <<SYS>>\nbe kind\n<</SYS>>\n\nwhat is there? [/INST] a cat </s>"
    "<s>[INST] what else? [/INST] nothing </s>",
    "chatml": "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nwhat is there?<|im_end|>\n"
    "<|im_start|>assistant\na cat<|im_end|>\n<|im_start|>user\nwhat else?<|im_end|>\n"
    "<|im_start|>assistant\nnothing<|im_end|>\n",
    "vicuna": "be kind USER: what is there? ASSISTANT: a cat</s>USER: what else? ASSISTANT: nothing</s>",
}
KINDS = ("bytes", "metaspace always", "metaspace first", "metaspace added", "bytelevel", "bytelevel trimmed", "words")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Tokenizers with every kind of splitting and of offsets. "added" has ChatML's marks as special tokens."""
    library = pytest.importorskip("tokenizers")
    models, pre, decoders = library.models, library.pre_tokenizers, library.decoders
    by_kind: dict[str, Any] = {"bytes": TOKENIZER}
    for kind in KINDS[1:]:
        name, _, how = kind.partition(" ")
        special = ["<unk>", "<s>", "</s>", *(["<|im_start|>", "<|im_end|>"] if how == "added" else [])]
        alphabet = [chr(n) for n in range(33, 127)] + ["\n", "▁"]
        built = library.Tokenizer(models.BPE(unk_token="<unk>"))
        if name == "metaspace":
            scheme = how if how == "first" else "always"
            built.pre_tokenizer, built.decoder = (
                pre.Metaspace(prepend_scheme=scheme),
                decoders.Metaspace(prepend_scheme=scheme),
            )
        elif name == "bytelevel":
            built.pre_tokenizer, built.decoder = pre.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
            built.post_processor = library.processors.ByteLevel(trim_offsets=how == "trimmed")
            alphabet = pre.ByteLevel.alphabet()
        else:
            words = sorted({word for text in PUBLISHED.values() for word in text.replace("</s>", " ").split()})
            built = library.Tokenizer(models.WordLevel({w: n for n, w in enumerate([*special, *words])}, "<unk>"))
            built.pre_tokenizer = pre.WhitespaceSplit()
            built.add_special_tokens(special)
        if name != "words":
            trainer = library.trainers.BpeTrainer(
                vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
            )
            built.train_from_iterator(PUBLISHED.values(), trainer)
        built.enable_truncation(4)  # as some published files have it; a dialogue is never cut so
        path = tmp_path_factory.mktemp("tokenizers") / "tokenizer.json"
        built.save(str(path))
        by_kind[kind] = make_tokenizer(str(path), tuple(ENCODERS))
    return by_kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", PUBLISHED)
def test_tokens_are_those_of_the_published_text(tokenizers, kind, template):
    """Encoded as a whole, special tokens in it; ChatML has no first and last token of its own."""
    tokenizer = tokenizers[kind]
    tokens = encode_dialogue(tokenizer, ENCODERS, {}, SAID, template=TEMPLATES[template], system=SYSTEM).tokens
    text = PUBLISHED[template]
    if isinstance(tokenizer, FileTokenizer):
        wanted = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids  # what reads "<s>" as a special token
    else:
        marks = {"<s>": tokenizer.bos, "</s>": tokenizer.eos}
        pieces = text.replace("<s>", "\0<s>\0").replace("</s>", "\0</s>\0").split("\0")
        wanted = [i for piece in pieces for i in ([marks[piece]] if piece in marks else tokenizer.encode(piece))]
    wanted = wanted if wanted[0] == tokenizer.bos else [tokenizer.bos, *wanted]
    assert tokens == (wanted if wanted[-1] == tokenizer.eos else [*wanted, tokenizer.eos])


def sample_of(dialogue: EncodedDialogue, answer: str) -> Sample:
    return Sample(
        tokens=np.asarray(dialogue.tokens),
        loss_weights=np.asarray(dialogue.weights),
        media={},
        question="",
        answer=answer,
        prompt=dialogue.prompt,
        lead=dialogue.lead,
        tail=dialogue.tail,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_right_answer_is_read_back_and_is_what_is_learned(tokenizers, kind, template):
    tokenizer, style = tokenizers[kind], TEMPLATES[template]
    answers = ["a cat"] if kind == "words" else ["yo", "a cat", " yo", "", "yo ", "yo\n", "\n", "  two  words ", "?!"]
    for answer in [*answers, *(["é漢\U0001f600", "{eos}"] if "byte" in kind else [])]:
        for turns in ((("q", answer),), (("q", answer), ("<image>", "mid"), ("<image>", answer))):
            counts = {"vision": [3, 2]} if len(turns) > 1 else {}
            dialogue = encode_dialogue(tokenizer, ENCODERS, counts, turns, template=style, system="be")
            sample = sample_of(dialogue, answer)
            answer_tokens = dialogue.tokens[dialogue.prompt :]
            assert all(dialogue.weights[dialogue.prompt :]) and not dialogue.weights[dialogue.prompt - 1]
            assert answer_tokens[-1] == tokenizer.eos and tokenizer.media_token("vision") not in answer_tokens
            assert answer_text(tokenizer, sample, answer_tokens[:-1]) == style.formatted(answer), (
                answer,
                dialogue.lead,
                dialogue.tail,
            )
            assert dialogue.tokens.count(tokenizer.media_token("vision")) == 5 * bool(counts)
            # The prompt is the same whatever the answer, but for what is one token with its beginning.
            learned = tokenizer.decode(t for t, w in zip(dialogue.tokens, dialogue.weights, strict=True) if w)
            assert "q" not in learned and "be" not in learned
            if template == "chatml" and answer:
                next_turn = tokenizer.encode("<|im_end|>\n<|im_start|>user")
                assert answer_text(tokenizer, sample, [*answer_tokens[:-1], *next_turn]) == answer


def test_a_tokenizers_own_marks_in_the_data(tokenizers):
    """The characters around made-up special tokens are none in the data."""
    tokenizer = tokenizers["bytelevel"]
    text = f"\ufdd0{tokenizer.media_token('vision')}\ufdd1"
    dialogue = encode_dialogue(tokenizer, ENCODERS, {}, ((text, "a"),))
    assert tokenizer.media_token("vision") not in dialogue.tokens and dialogue.tokens.count(tokenizer.eos) == 1
    assert tokenizer.decode(dialogue.tokens).startswith("\N{REPLACEMENT CHARACTER}")


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
    custom = Template().changed("Source.pieces", {"question": "Q: {text}\n", "answer": "A: {text}\n"})
    assert shown(encode_dialogue(TOKENIZER, ENCODERS, {}, (("x", "y"),), template=custom).tokens) == "Q: x\nA: y\n$"
    with pytest.raises(ConfigError, match=r"a template has no 'asnwer'; did you mean 'answer'"):
        custom.changed("Source.pieces", {"asnwer": "{text}"})
    with pytest.raises(ConfigError, match=r"Source\.pieces\['answer'\]='A': must have \{text\} once"):
        custom.changed("Source.pieces", {"answer": "A"})
    with pytest.raises(ConfigError, match=r"only a question may have \{system\}, and once"):
        custom.changed("Source.pieces", {"answer": "{system}{text}"})
