"""JSON lists and lines: what is broken is named and costs no other record; whatever Python's parser raises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_sources import opened, text_of

from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.llava import LlavaReader
from mmjax.data.sources.record import Unusable
from mmjax.data.tokenizer import ByteTokenizer

A, B = (json.dumps({"question": text, "answer": "x"}) for text in "ab")
LONG = "1" * 5000
DEEP = "[" * 100_000 + "]" * 100_000
ENDLESS = "the list does not end: the file is truncated"


def read(folder: Path, text: str | bytes, name: str = "data.json", limit: int = 1 << 20) -> tuple[list[str], list[str]]:
    """Questions of the records that can be read, and why others cannot."""
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    reader = LlavaReader(SourceConfig(path=str(path), byte_limit=limit))
    questions, faults = [], []
    for entry in reader.scan():
        assert entry.name.startswith(str(path)) and bool(entry.place) != bool(entry.fault)
        try:
            questions += [reader.read(entry.place).dialogue[0].text] if entry.place else []
            faults += [entry.fault] if entry.fault else []
        except Unusable as error:
            faults.append(str(error))
    return questions, faults


@pytest.mark.parametrize(
    ("text", "questions", "faults"),
    [
        (f" [ {A} ,\r\n{B}\t]\n ", "ab", []),
        ("[]", "", []),
        (f"\ufeff[{A}]", "a", []),
        (f"[{A}", "a", [ENDLESS]),
        (f"[{A}, ", "a", [ENDLESS]),
        ("[", "", [ENDLESS]),
        (f"[{A}, {B[:9]}", "a", ["not JSON (Unterminated string starting at); nothing after it can be read"]),
        (f"[{A} {B}]", "ab", ["no comma before '{\"question\": \"b\", \"a'"]),
        (f"[{A}:{B}]", "a", ["no comma before ':{\"question\": \"b\", \"'", "not JSON (Expecting value); nothing aft"]),
        (f"[{A},]", "a", ["the list ends with a comma"]),
        (f"[,{A},,{B}]", "ab", ["nothing between two commas, or before the first"] * 2),
        (f"[{A}] {B}", "a", ["the file goes on after the list: '{\"question\": \"b\", \"a'"]),
        (f"[{A}]]", "a", ["the file goes on after the list: ']'"]),
        (f"[{A}][{B}]", "a", ["the file goes on after the list"]),
        (f"[{A}, {{'question': 'b'}}]", "a", ["not JSON (Expecting property name"]),
        # Each of these spoils one record, and none after it.
        (f'[{{"question": {LONG}, "answer": ""}}, {B}]', "b", ["a number of more than 4300 digits"]),
        (f'[{{"id": [[{{"n": -{LONG}}}]], "question": "", "answer": ""}}, {B}]', "b", ["more than 4300 digits"]),
        (f"[{LONG}, {B}]", "b", ["more than 4300 digits"]),
        (f'[{{"question": NaN, "answer": "x"}}, {B}]', "b", ["question=nan must be a string"]),
        (f'[[{A}], {B}, null, 1e999]', "b", [f"must be an object, not {n}" for n in ("list", "NoneType", "float")]),
        (f'[{A}, {{"question": "é", "answer": "x"}}, {B}]'.encode("latin-1"), "ab", ["is not UTF-8 text"]),
        (f'[{{"question": "{"q" * 7000}", "answer": "x"}}, {B}]', "b", ["bytes are more than 6000"]),
        # These are read as Python's parser reads them.
        (f'[{{"id": NaN, "score": Infinity, "question": "a", "answer": "x"}}, {B}]', "ab", []),
        (f'[{{"question": "z", "question": "a", "answer": "x"}}, {B}]', "ab", []),
        (f"[{A}, {DEEP}, {B}]", "a", ["not JSON (nested too deeply); nothing after it can be read"]),
    ],
)  # fmt: skip
def test_lists(text, questions, faults, tmp_path):
    texts = read(tmp_path, text, limit=6000)
    assert "".join(texts[0]) == questions
    assert len(texts[1]) == len(faults) and all(map(str.__contains__, texts[1], faults)), texts[1]


def test_text_in_a_list_is_what_it_is_in_a_line(tmp_path):
    """Places are bytes, whatever stands before them."""
    texts = ["é", "«das»", "漢字 \U0001f600", "\u2028", "\\", '"']
    rows = [json.dumps({"question": text, "answer": "x"}, ensure_ascii=False) for text in texts]
    assert read(tmp_path, "\ufeff[" + ",\n".join(rows) + "]") == (texts, [])
    assert read(tmp_path, "\ufeff" + "\n".join(rows), "data.jsonl") == (texts, [])


def test_other_encodings_and_lines(tmp_path):
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        for name in ("data.json", "data.jsonl"):
            questions, faults = read(tmp_path, f"[{A}]".encode(encoding), name)
            assert not questions and faults and ("JSON" in faults[0] or "UTF-8" in faults[0])
    lines = [A, f'{{"question": {LONG}, "answer": ""}}', '{"question": "é", "answer": ""}', DEEP, B + ",", A + B, "NaN"]
    questions, faults = read(tmp_path, "\n".join(lines).encode("latin-1"), "data.jsonl")
    assert questions == ["a"] and len(faults) == 6
    wanted = ("4300 digits", "is not UTF-8", "nested too deeply", "Extra data", "Extra data", "must be an object")
    assert all(map(str.__contains__, faults, wanted)), faults
    assert read(tmp_path, A + "\n" + "x" * 3000 + "\n" + B, "data.jsonl", 2000) == (
        ["a", "b"],
        ["the line is longer than 2000 bytes"],
    )


def test_texts_that_are_far_too_long_are_not_encoded(tmp_path, monkeypatch):
    """Encoding takes a hundred times as much memory. Under `cut` the first turns stay."""
    long = "word " * 300_000
    turns = [{"from": speaker, "value": "hi"} for speaker in ("human", "gpt") * 2]
    rows = [
        {"question": "q", "answer": long},
        {"question": "q", "answer": "a"},
        {"conversations": [*turns, {"from": "human", "value": long}, {"from": "gpt", "value": "a"}]},
        {"question": "q", "answer": "a", "other": [[]] * (1 << 20)},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encode, longest = ByteTokenizer.encode, [0]

    def watched(tokenizer, text):
        longest.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(ByteTokenizer, "encode", watched)
    for cut in (False, True):
        mixture = opened(tmp_path, SourceConfig(path=str(tmp_path / "data.jsonl"), cut=cut), split="test")
        assert len(mixture) == 1 + cut and max(longest) < 1 << 20
        reasons = [fault.reason for fault in mixture.sources[0].index.left_out()]
        assert reasons[0] == "about 1500033 characters; Data.sequence_length is 4096 tokens"
        assert reasons[-1] == "not JSON that can be read (more than 1048576 values)"
    assert text_of(mixture.sample(1).tokens).startswith("hi hi")
