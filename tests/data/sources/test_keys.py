"""Keys of records that change what is learned, marks that are text or places, and names of media."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sources import TOKENIZER, Heard, encoded, opened, pixels, text_of
from test_formats import PLACE, dialogue, parts, write_json

from mmjax.data.sample import encode_dialogue
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.record import Turn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate("abc"):
        (tmp_path / f"{name}.png").write_bytes(encoded(pixels(8, 8, seed)))
    return tmp_path


def reasons(mixture: Any) -> dict[str, str]:
    return {fault.id: fault.reason for fault in mixture.sources[0].index.left_out()}


def samples(mixture: Any) -> list[Any]:
    return [mixture.sample(at) for at in range(len(mixture))]


def learned(sample: Any) -> list[tuple[str, float]]:
    """The learned stretches of a sample, with their weights."""
    stretches: list[tuple[list[int], float]] = []
    for token, weight in zip(sample.tokens, sample.loss_weights.tolist(), strict=True):
        if not stretches or stretches[-1][1] != weight:
            stretches.append(([], weight))
        stretches[-1][0].append(token)
    return [(text_of(np.asarray(tokens)), weight) for tokens, weight in stretches if weight]


def answered(**keys: Any) -> dict[str, Any]:
    """A dialogue whose first answer has keys."""
    first, second, *later = dialogue("what?", "BAD", "again?", "a cat")
    return {"messages": [first, {**second, **keys}, *later]}


@pytest.mark.parametrize(
    ("keys", "weight"),
    [
        ({"loss": False}, 0), ({"weight": 0}, 0), ({"train": False}, 0), ({"weight": 0.0, "loss": True}, 0),
        ({"weight": 0.25}, 0.25), ({"loss_scale": 2}, 2), ({"weight": 0.5, "train": True}, 0.5),
        ({"loss": None, "weight": None, "train": True}, 1), ({"name": "bot", "mask": False}, 1),
    ],
)  # fmt: skip
def test_a_turn_says_how_much_of_it_is_learned(folder, keys, weight):
    """The answer stays in the text, as context of those after it."""
    mixture = opened(folder, write_json(folder, [answered(**keys)]), split="test")
    (sample,) = samples(mixture)
    assert text_of(sample.tokens) == "what? BAD$again? a cat$"
    wanted = [("BAD$", weight), ("a cat$", 1)] if weight else [("a cat$", 1)]
    assert learned(sample) == wanted
    total = 4 * weight + 6
    assert mixture.meta(0).weight == sample.loss_weights.sum() == total
    assert mixture.meta(0).learned == (10 if weight else 6)
    assert (sample.question, sample.answer) == ("again?", "a cat")


def test_the_last_answer_is_the_last_that_is_learned(folder):
    """What comes after it is neither asked nor answered in an evaluation."""
    bad = {"role": "assistant", "content": "BAD", "loss": False}
    rows = [{"messages": [*dialogue("one?", "1", "two?"), bad]}]
    (sample,) = samples(opened(folder, write_json(folder, rows), split="test"))
    assert learned(sample) == [("1$", 1)] and (sample.question, sample.answer) == ("one?", "1")
    assert text_of(sample.tokens[: sample.prompt]) == "one? "


def test_a_record_says_how_much_of_its_answers_is_learned(folder):
    rows = [
        {"weight": 0.5, **answered()}, {"weight": 0.5, **answered(weight=2)},
        {"question": "q", "answer": "a", "loss": 3},
        {"question": "q", "answer": "a", "train": False},
    ]  # fmt: skip
    mixture = opened(folder, write_json(folder, [{"id": at, **row} for at, row in enumerate(rows)]), split="test")
    weights = [learned(sample) for sample in samples(mixture)]
    assert weights == [[("BAD$", 0.5), ("a cat$", 0.5)], [("BAD$", 2), ("a cat$", 0.5)], [("a$", 3)]]
    assert reasons(mixture) == {"3": "none of its answers is learned"}


def turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no number": (answered(weight="x"), "turn 2: weight='x' must be true, false or a number of 0 or more"),
    "below 0": (answered(weight=-1), "turn 2: weight=-1 must be true, false or a number"),
    "infinite": (answered(loss=float("inf")), "turn 2: loss=inf must be true"),
    "masked": (answered(masked=True), "turn 2: masked=True says that something is not learned; write weight: 0 for it"),
    "detail": (answered(train_detail=[{"begin_offset": 0}]), "turn 2: train_detail="),
    "bad": ({**answered(), "label": False}, "label=false says that its answer is a bad one"),
    "functions": ({**answered(), "functions": [{"name": "f"}]}, "it has functions: write them as tools"),
    "tools": ({**answered(), "tools": [{"name": "f"}]}, "it has tools, which the template of a folder alone can write"),
    "tools text": ({**answered(), "tools": "["}, "tools is not JSON"),
    "no tools": ({**answered(), "tools": [3]}, "tools=[3] must be a list of objects"),
    "call": (answered(content="", tool_calls=[{"name": "f"}]), "turn 2 has tool_calls, which the template of a folder"),
    "call alone": (answered(content=None, tool_calls=[{"name": "f"}]), "turn 2 has tool_calls"),
    "thoughts": (answered(reasoning_content="hm"), "turn 2 has reasoning_content, which the template of a folder"),
    "tool": ({"messages": [*dialogue("a", "b"), turn("tool", "c"), *dialogue("a", "b")]}, "turn 3 is from 'tool'"),
    "late system": ({"messages": [*dialogue("a"), turn("system", "c"), turn("assistant", "b")]}, "no mark for it"),
    "two systems": ({"system": "x", "messages": [turn("system", "y"), *dialogue("a", "b")]}, "another one"),
    "no question": ({"messages": dialogue("a", "b")[1:]}, "the dialogue has no question"),
    "no answer": ({"messages": dialogue("a", "b")[:1]}, "the dialogue has no answer"),
    "a question last": ({"messages": dialogue("a", "b", "c")}, "the dialogue does not end with an answer"),
    "dog": ({"messages": [{"role": "dog", "content": "x"}]}, "turn 1 is from 'dog': none of user, human, assistant"),
    "video": ({"messages": dialogue("<video>\nwhat?", "x")}, "the dialogue has 1 <video> marks for 0 videos: name 1"),
}  # fmt: skip


def test_what_would_be_learned_otherwise_is_left_out(folder):
    rows = [{"id": name, **row} for name, (row, _) in REFUSED.items()] + [{"id": "good", **answered(), "label": 3}]
    mixture = opened(folder, write_json(folder, rows), split="test")
    faults = reasons(mixture)
    assert len(mixture) == 1 and faults.keys() == REFUSED.keys()
    assert all(reason in faults[name] for name, (_, reason) in REFUSED.items()), faults


def test_keys_that_nobody_reads_are_named_once(folder):
    rows = [{"id": 1, "source": "x", "model": "", **answered(name="bot", emotion="glad")}] * 3
    rows += [{"source": "y", "tools": [], "image": None, "question": "q", "answer": "a"}]
    heard = Heard()
    assert len(opened(folder, write_json(folder, rows), split="test", observer=heard)) == 4
    message = "own: keys that are not read: 'source' (4 records), 'name' (3 records), 'emotion' (3 records)"
    assert [line for line in heard.lines if "not read" in line] == [message]


def test_turns_of_any_order_are_as_the_template_has_them(folder):
    """Consecutive turns of one role, an answer first, and a system prompt beside the dialogue or in its midst."""
    user, answer = (
        (lambda text: {"role": "user", "content": text}),
        (lambda text: {"role": "assistant", "content": text}),
    )
    rows = [
        {"messages": [user("one"), user("two"), answer("a"), answer("b")]},
        {"images": ["a.png"], "messages": [answer("hello"), user("what?"), answer("a")]},
        {"system": "be", "messages": [user("q"), answer("a")]},
        {"messages": [user("q"), {"role": "system", "content": "late"}, answer("a")]},
    ]
    mixture = opened(folder, write_json(folder, rows), split="test")
    assert [text_of(sample.tokens) for sample in samples(mixture)] == ["one two a$b$", "hello$1:<v>what? a$", "be q a$"]
    assert learned(mixture.sample(0)) == [("a$b$", 1)] and learned(mixture.sample(1)) == [("hello$", 1), ("a$", 1)]
    config = SourceConfig(path=str(folder / "data.json"), max_patches=0, template="chatml")
    late = text_of(opened(folder, config, split="test").sample(3).tokens)
    assert late.startswith(
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>system\nlate<|im_end|>\n<|im_start|>assistant\na"
    )
    config = SourceConfig(path=str(folder / "data.json"), max_patches=0, template="llama2")
    mixture = opened(folder, config, split="test")
    assert len(mixture) == 1 and all(
        "questions and answers in turn" in fault.reason for fault in mixture.sources[0].index.left_out()
    )


def test_a_dialogue_is_cut_behind_an_answer_that_is_learned(folder):
    rows = [
        {"images": ["a.png", "b.png"], "messages": [
            *dialogue("<image>q", "first"), {"role": "user", "content": "x"}, {"role": "user", "content": "y"},
            {"role": "assistant", "content": "sec"}, {"role": "assistant", "content": "ond"},
            *dialogue("<image>" + "z" * 40, "third"),
        ]},
        {"messages": [*answered(loss=False)["messages"], *dialogue("z" * 40, "third")]},
        {"messages": [*answered(loss=False)["messages"][:2], *dialogue("z" * 60, "third")]},
    ]  # fmt: skip
    config = SourceConfig(path=write_json(folder, rows).path, max_patches=0, cut=True)
    for length, texts in ((40, ["<v>q first$x y sec$ond$", "what? BAD$again? a cat$"]), (20, ["<v>q first$"])):
        mixture = opened(folder, config, split="test", sequence_length=length)
        assert [text_of(sample.tokens) for sample in samples(mixture)] == texts
        assert len(mixture.sample(0).media["vision"]) == 1


LITERAL = "How is <image> written?"
ONE, TWO = {"images": ["a.png"]}, {"images": ["a.png", "b.png"]}
TEXTS: list[tuple[dict[str, Any], str, str]] = [
    (ONE | {"messages": dialogue(parts(PLACE, LITERAL), parts("So: <image>."))}, f"<v>{LITERAL} So: <image>.$", "a"),
    ({"messages": dialogue(LITERAL, "So: <image>.")}, f"{LITERAL} So: <image>.$", ""),
    ({"question": LITERAL, "answer": "As <image>."}, f"{LITERAL} As <image>.$", ""),
    (ONE | {"messages": dialogue("<image>\nParse it.", "![fig](<image>)")}, "<v>\nParse it. ![fig](<image>)$", "a"),
    (TWO | {"messages": dialogue("<image>\nDraw it.", "So: <image>")}, "<v>\nDraw it. So: <v>$", "ab"),
    (TWO | {"messages": dialogue(parts(PLACE, "like <image>?"), parts("yes"))}, "<v>like <v>? yes$", "ab"),
    ({"messages": dialogue(parts({**PLACE, "image": "c.png"}, LITERAL), "<image>")}, f"<v>{LITERAL} <image>$", "c"),
    (ONE | {"messages": [turn("system", "No <image>."), *dialogue("<image>q", "a")]}, "No <image>. <v>q a$", "a"),
    (ONE | {"messages": dialogue("<image>q \ufdd5\ufdd6\ufdd7", "a")}, "<v>q \ufffd\ufffd\ufffd a$", "a"),
    ({"image": "", "messages": dialogue("1+1?", "2")}, "1+1? 2$", ""),
    ({"images": [""], "messages": dialogue("1+1?", "2")}, "1+1? 2$", ""),
    ({"images": [{"bytes": None, "path": None}], "messages": dialogue("1+1?", "2")}, "1+1? 2$", ""),
    (ONE | {"messages": dialogue(parts({**PLACE, "image": {"bytes": None}}, "q"), "a")}, "<v>q a$", "a"),
    ({"image": "a.png", "images": ["b.png", "a.png"], "messages": dialogue("q", "a")}, "1:<v>2:<v>q a$", "ba"),
]


def test_marks_that_are_text_and_media_that_are_none(folder):
    config = write_json(folder, [row for row, _, _ in TEXTS])
    mixture = opened(folder, config, split="test")
    assert not reasons(mixture)
    for sample, (_, text, names) in zip(samples(mixture), TEXTS, strict=True):
        assert text_of(sample.tokens) == text
        media = sample.media.get("vision", ())
        assert len(media) == len(names)
        for medium, name in zip(media, names, strict=True):
            assert np.allclose(medium * 255, pixels(8, 8, "abc".index(name)), atol=1e-3)
        assert "\ufdd5" not in sample.question + sample.answer


def test_places_without_their_media_are_never_text(folder):
    rows: dict[str, dict[str, Any]] = {
        "first": {"messages": dialogue("<image>\nwhat?", "x")},
        "last": {"conversations": [{"from": "human", "value": "what?\n<image>"}, {"from": "gpt", "value": "x"}]},
        "null": {"image": None, "messages": dialogue(LITERAL, "x")},
        "empty": {"images": [""], "messages": dialogue(LITERAL, "x")},
        "one of two": {"images": ["a.png", ""], "messages": dialogue("<image>what?", "x")},
        "too few": {"images": ["a.png"], "messages": dialogue("<image> and <image>?", "x")},
        "which": {"images": ["a.png"], "messages": dialogue("what?", "<image> and <image>")},
        "two keys": {"image": "a.png", "images": ["b.png"], "messages": dialogue("<image>?", "x")},
    }
    mixture = opened(
        folder, write_json(folder, [{"id": name, **row} for name, row in rows.items()] + [TEXTS[0][0]]), split="test"
    )
    assert len(mixture) == 1 and reasons(mixture).keys() == rows.keys()
    assert reasons(mixture)["one of two"] == "one of its images is empty"
    assert reasons(mixture)["first"] == "the dialogue has 1 <image> marks for 0 images: name 1"


def test_names_of_media(folder):
    """Absolute paths and file: URLs inside the folder, through a link too, and data: URLs."""
    (folder / "in").mkdir()
    (folder / "in" / "ä b.png").write_bytes((folder / "b.png").read_bytes())
    (folder / "link").symlink_to(folder)
    code = base64.b64encode((folder / "c.png").read_bytes()).decode()
    quoted = "".join(f"%{byte:02x}" for byte in (folder / "c.png").read_bytes())
    right = {
        f"{folder}/a.png": 0, f"file://{folder}/a.png": 0, f"file://localhost{folder}/in/%C3%A4%20b.png": 1,
        f"{folder}/in/ä b.png": 1, f"{folder}/link/a.png": 0, f"data:image/png;base64,{code}": 2,
        f"DATA:;base64,{code[:40]}\n{code[40:]}": 2, f"data:,{quoted}": 2,
    }  # fmt: skip
    wrong = {
        "/etc/passwd": "leads out of the folder", f"{folder}/../x.png": "leads out of the folder",
        f"{folder}x/a.png": "leads out", "file:///etc/passwd": "is a URL", f"file://{folder}/../a.png": "is a URL",
        "http://h/a.png": "is a URL", "data:image/png;base64,?": "not base64", "data:image/png": "without a comma",
        "data:image/png;base64,iVBORw0KGgo=": "no JPEG", str(folder): "leads out",
    }  # fmt: skip
    for media in (folder, folder / "link"):
        rows = [{"id": at, "image": name, "caption": "x"} for at, name in enumerate([*right, *wrong])]
        rows += [
            {"messages": dialogue(parts({"type": "image_url", "image_url": {"url": name}}, "q"), "a")} for name in right
        ]
        (folder / "data.json").write_text(json.dumps(rows))
        config = SourceConfig(path=str(folder / "data.json"), media=str(media), max_patches=0)
        mixture = opened(folder, config, split="test", skipped=folder / "skipped.jsonl")
        assert len(mixture) == 2 * len(right)
        for sample, seed in zip(samples(mixture), [*right.values()] * 2, strict=True):
            (medium,) = sample.media["vision"]
            assert np.allclose(medium * 255, pixels(8, 8, seed), atol=1e-3)
        faults = reasons(mixture)
        assert all(reason in faults[str(at)] for at, reason in enumerate(wrong.values(), len(right))), faults
    assert code not in (folder / "skipped.jsonl").read_text()


def test_weights_of_turns_in_a_table(tmp_path):
    """A table gives every turn the keys of all; those without a value say nothing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    turns = [
        {"role": "user", "content": "q", "weight": None, "tool_calls": None},
        {"role": "assistant", "content": "a", "weight": 0.5, "tool_calls": []},
    ]
    kind = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("weight", pa.float64()),
            ("tool_calls", pa.list_(pa.string())),
        ]
    )
    table = pa.table({"messages": pa.array([turns], pa.list_(kind)), "tools": pa.array([None], pa.string())})
    pq.write_table(table, tmp_path / "data.parquet")
    mixture = opened(tmp_path, SourceConfig(kind="parquet", path=str(tmp_path / "data.parquet")), split="test")
    assert learned(mixture.sample(0)) == [("a$", 0.5)]


def test_a_token_on_the_border_of_two_weights_has_the_larger() -> None:
    turns = [
        Turn(role="user", text="q"),
        Turn(role="assistant", text="é", weight=0.5),
        Turn(role="assistant", text="b"),
    ]
    laid = encode_dialogue(TOKENIZER, {}, {}, turns)
    assert laid.weights == [0, 0, 0, 0.5, 0.5, 0.5, 1, 1]


def test_a_mark_before_media_without_one_is_refused(folder):
    rows = [{"images": ["a.png", "b.png"], "messages": dialogue("x", "<image>hello", "what?", "a")[1:]}, answered()]
    (reason,) = reasons(opened(folder, write_json(folder, rows), split="test")).values()
    assert reason == "<image> stands before the first question, where media without a mark are"
