"""Tokenizers: text survives, special ids are apart from it, and what is missing is said."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.configurable import ConfigError
from mmjax.data.tokenizer import ByteTokenizer, FileTokenizer, make_tokenizer


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer(("vision", "audio"))
    ids = tokenizer.encode(text)
    special = [tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.media_token("audio")]
    assert tokenizer.decode(ids) == text == tokenizer.decode([*special, *ids, *special])
    assert not set(ids) & set(special)


def test_byte_ids_are_settled():
    tokenizer = ByteTokenizer(("vision", "audio"))
    assert tokenizer.encode("é7") == [0xC3, 0xA9, 0x37]
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos) == (256, 257, 258)
    assert (tokenizer.media_token("vision"), tokenizer.media_token("audio"), tokenizer.vocab_size) == (259, 260, 261)
    assert tokenizer.table_size == 259  # placeholders are replaced before anything is computed of them
    assert tokenizer.decode([0xC3, 55]) == "\N{REPLACEMENT CHARACTER}7"


def test_unknown_encoder_is_named():
    with pytest.raises(ConfigError, match=r"Model\.encoders=\['vision'\] lack 'sight'"):
        ByteTokenizer(("vision",)).media_token("sight")


def write_tokenizer(path, special: list[str]) -> None:
    library = pytest.importorskip("tokenizers")
    vocabulary = {token: i for i, token in enumerate(["read", "seven", "[UNK]"])}
    tokenizer = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path))


def test_file_tokenizer_uses_its_special_tokens_and_adds_what_lacks(tmp_path):
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path, ["<s>", "</s>"])
    tokenizer = make_tokenizer(str(path), ("vision",))
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.encode("read seven") == [0, 1]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (3, 4, 5)
    assert (tokenizer.media_token("vision"), tokenizer.vocab_size, tokenizer.table_size) == (6, 7, 5)
    assert tokenizer.decode([3, 0, 6, 1, 4, 5]) == "read seven"


def test_missing_or_broken_file_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match=r"Data\.tokenizer=.*none\.json.*does not exist"):
        make_tokenizer(str(tmp_path / "none.json"), ())
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json.*is not a tokenizer\.json"):
        make_tokenizer(str(tmp_path / "bad.json"), ())


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="needs the tokenizers package: pip install tokenizers"):
        make_tokenizer("tokenizer.json", ())
