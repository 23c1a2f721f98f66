"""JSON that others wrote: every damaged, hostile or absent file is one line that names it and the fix."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.configurable import ConfigError
from mmjax.data.processor.files import find_chat_template, has_tokenizer, is_processor, read_json, tokenizer_digest
from mmjax.data.processor.image_rules import image_settings
from mmjax.data.processor.special import read_special_tokens
from mmjax.json_files import is_there, parse, read_object, read_text
from mmjax.weights.folder import WeightsFolder, read_config, read_extractor

HOSTILE = {
    "brackets": (b"[" * 200_000, "nested too deeply"),
    "objects": (b'{"a":' * 200_000, "nested too deeply"),
    "digits": (b"9" * 5000, "a number of more than 4300 digits"),
    "values": (b"[" + b"[]," * 300_000 + b"1]", "more than 524288 values"),
    "binary": (b"\xff\xfe\x00{}", "not UTF-8 text .invalid start byte at byte 0."),
    "empty": (b"", "Expecting value at column 1"),
    "cut": (b'{\n"a": ', "Expecting value at line 2, column 6"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_json_is_one_line(name):
    data, said = HOSTILE[name]
    with pytest.raises(ValueError, match=said) as error:
        parse(data, 1 << 19)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_commas_in_texts_are_no_values():
    text = json.dumps({"a": "[,{" * 1000, "b": '\\",[' * 1000})
    assert parse(text, 10) == json.loads(text) == parse(b"\xef\xbb\xbf" + text.encode(), 10)
    with pytest.raises(ValueError, match="more than 10 values"):
        parse(json.dumps([[]] * 9), 10)


PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
VALUES = st.lists(PLAIN | st.dictionaries(st.text(max_size=3), st.lists(PLAIN, max_size=3), max_size=3), max_size=5)


@given(value=VALUES, changes=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 255)), max_size=3))
@settings(max_examples=40, deadline=None)
def test_bytes_are_read_as_json_reads_them_or_refused_in_a_line(value, changes):
    data = bytearray(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    for at, byte in changes:
        data[at % len(data)] = byte
    try:
        wanted = json.loads(bytes(data).decode("utf-8"))
    except ValueError:
        with pytest.raises(ValueError, match=r"^not ") as error:
            parse(bytes(data))
        assert "\n" not in str(error.value)
    else:
        found = parse(bytes(data))
        assert repr(found) == repr(wanted)


def odd(folder: Path, name: str, kind: str) -> Path:
    """Something by the name of a file."""
    path = folder / name
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("nothing")
    elif kind == "loop":
        path.symlink_to(name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "unreadable":
        path.write_text("{}")
        path.chmod(0)
    else:
        path.write_bytes(HOSTILE[kind][0] if kind in HOSTILE else kind.encode())
    return path


ODD = ("folder", "dangling", "loop", "pipe", "brackets", "binary", "empty", "[1]")
READERS = {
    "config.json": (read_config, is_processor, read_special_tokens),
    "tokenizer_config.json": (find_chat_template, read_special_tokens),
    "special_tokens_map.json": (read_special_tokens,),
    "generation_config.json": (read_special_tokens,),
    "chat_template.json": (find_chat_template,),
    "preprocessor_config.json": (image_settings, read_extractor),
    "processor_config.json": (image_settings, read_extractor),
    "model.safetensors.index.json": (WeightsFolder.open,),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", list(READERS))
def test_odd_files_of_a_folder_are_named(name, kind, tmp_path):
    if name == "model.safetensors.index.json":
        (tmp_path / "config.json").write_text("{}")
    odd(tmp_path, name, kind)
    for read in READERS[name]:
        with pytest.raises(ConfigError, match=rf"{re.escape(str(tmp_path / name))}.* get it again$") as error:
            read(str(tmp_path))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["folder", "dangling", "loop", "pipe"])
def test_odd_files_that_are_no_json_are_named(kind, tmp_path):
    for name, read in (
        ("chat_template.jinja", find_chat_template),
        ("tokenizer.json", has_tokenizer),
        ("tokenizer.json", tokenizer_digest),
        ("model.safetensors", WeightsFolder.open),
    ):
        folder = tmp_path / f"{name} {read.__name__}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        odd(folder, name, kind)
        with pytest.raises(ConfigError, match=rf"{re.escape(str(folder / name))}.* get it again"):
            read(str(folder))


def test_files_and_their_fixes(tmp_path):
    (tmp_path / "a.json").write_text('{"a": "é"}', encoding="utf-8")
    assert read_object(tmp_path / "a.json") == {"a": "é"} and read_json(str(tmp_path), "none.json") == {}
    assert is_there(tmp_path / "a.json") and not is_there(tmp_path / "b") and not is_there(tmp_path / "a.json" / "b")
    for read, said in (
        (lambda: read_text(tmp_path / "a.json", "cut it", most=4), "larger than 0 MiB; cut it"),
        (lambda: read_object(tmp_path / "b.json", "write it"), "does not exist; write it"),
        (lambda: is_there(tmp_path / "a\0"), "null byte"),
    ):
        with pytest.raises(ConfigError, match=said):
            read()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files_are_named(tmp_path):
    odd(tmp_path, "config.json", "unreadable")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read \(Permission denied\); get it again"):
        read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": {"a": 3}}', "names '3', which is no file"),
        ('{"weight_map": {"a": ["b"]}}', "which is no file"),
        ('{"weight_map": {"a": "../b"}}', "names '../b', which is no file"),
        ('{"weight_map": {"a": ""}}', "names '', which is no file"),
        ('{"weight_map": {"a": "b\\u0000"}}', "which is no file"),
        ('{"weight_map": []}', "it has no 'weight_map'"),
        ('{"weight_map": {}}', "it has no 'weight_map'"),
        ("{}", "it has no 'weight_map'"),
        ('{"weight_map": {"a": "b.safetensors"}}', "lacks 1 of 1 files, such as b.safetensors; download them"),
    ],
)
def test_indexes_that_name_no_files(index, said, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=said):
        WeightsFolder.open(str(tmp_path))
