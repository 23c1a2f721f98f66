"""Special tokens that a folder lists beside ``tokenizer.json``: ids and texts are as if they stood in it.

``transformers`` gives all of these folders the same ids as the one that they are made of.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from mmjax.configurable import ConfigError
from mmjax.data.processor.files import tokenizer_digest
from mmjax.data.processor.template import read_template
from mmjax.data.sample import encode_dialogue
from mmjax.data.tokenizer import FileTokenizer, make_tokenizer
from mmjax.data.types import EncoderSpec

pytest.importorskip("tokenizers")

FOLDERS = Path(__file__).parents[1] / "oracles" / "processors"
FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
IMAGES, ENDS = ("<|image_pad|>", "<|video_pad|>"), ("<|im_start|>", "<|im_end|>")
ALL = ("<|endoftext|>", *ENDS, "<|vision_start|>", "<|vision_end|>", *IMAGES)
TURNS = (("<image>What is in the picture?", "A small dog."), ("and the other?", "yes"))


def late(folder: Path, gone: Collection[str], where: str = "tokenizer_config.json", source: str = "qwen2_vl") -> Path:
    """A copy of a folder in which special tokens are listed in another file."""
    copy = Path(shutil.copytree(FOLDERS / source, folder / "late"))
    tokenizer, config = json.loads((copy / "tokenizer.json").read_text()), read(copy, "tokenizer_config.json")
    listed = tokenizer["added_tokens"]
    tokenizer["added_tokens"] = [token for token in listed if token["content"] not in gone]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    if where == "added_tokens.json":
        (copy / where).write_text(json.dumps({token["content"]: token["id"] for token in listed}))
    elif where:
        config["added_tokens_decoder"] = {
            str(token["id"]): {key: token[key] for key in FLAGS} for token in reversed(listed)
        }
        (copy / where).write_text(json.dumps(config))
    return copy


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def said(folder: Path) -> tuple[FileTokenizer, tuple[list[int], list[float]]]:
    tokenizer = make_tokenizer(str(folder), ("vision",), "vision")
    assert isinstance(tokenizer, FileTokenizer)
    encoders = {"vision": EncoderSpec(patch=1, channels=3)}
    laid = encode_dialogue(tokenizer, encoders, {"vision": [3]}, TURNS, template=read_template(str(folder)))
    return tokenizer, (laid.tokens, laid.weights)


@pytest.mark.parametrize("where", ["tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("gone", [IMAGES, ENDS, ALL], ids=["images", "ends", "all"])
def test_late_tokens_have_their_ids_and_texts(tmp_path: Path, gone: tuple[str, ...], where: str) -> None:
    """Also those in the middle: the library numbers what is left of ``tokenizer.json`` without gaps."""
    (expected, laid), (late_tokenizer, late_laid) = said(FOLDERS / "qwen2_vl"), said(late(tmp_path, gone, where))
    assert late_laid == laid
    numbers = [
        (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.stops, tokenizer.vocab_size, tokenizer.table_size)
        for tokenizer in (expected, late_tokenizer)
    ]
    assert numbers[0] == numbers[1]
    assert [late_tokenizer.token(text) for text in ALL] == [expected.token(text) for text in ALL]


def test_a_text_in_the_vocabulary_becomes_a_token_of_its_own(tmp_path: Path) -> None:
    """A vocabulary may have the text, which is found in texts only where it is listed too."""
    folder = late(tmp_path, ENDS)
    tokenizer, wanted = read(folder, "tokenizer.json"), said(FOLDERS / "qwen2_vl")[0]
    tokenizer["model"]["vocab"] |= {text: wanted.token(text) for text in ALL[:3]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert said(folder)[1] == said(FOLDERS / "qwen2_vl")[1]


def test_a_token_that_is_named_alone_is_added_behind_the_others(tmp_path: Path) -> None:
    """As ``transformers`` adds it: <|end_of_turn|>, the end of an answer, and another one."""
    folder = late(tmp_path, (), where="", source="chatml")
    config = read(folder, "tokenizer_config.json")
    named = {"eos_token": "<|end_of_turn|>", "additional_special_tokens": ["<|tool|>", {"content": "<|im_end|>"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **named}))
    tokenizer = make_tokenizer(str(folder), ())
    size = 1 + max(token["id"] for token in read(folder, "tokenizer.json")["added_tokens"])
    assert tokenizer.eos == size and tokenizer.encode("a<|end_of_turn|><|tool|>")[-2:] == [size, size + 1]
    assert tokenizer.table_size == size + 1


def test_a_table_has_no_row_for_a_padding_that_is_named_alone(tmp_path: Path) -> None:
    folder = late(tmp_path, (), where="", source="llama3")
    before = make_tokenizer(str(folder), ())
    config = read(folder, "tokenizer_config.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "[PAD]"}))
    tokenizer = make_tokenizer(str(folder), ())
    assert tokenizer.table_size == before.table_size and tokenizer.pad >= tokenizer.table_size


def test_an_image_without_a_text_is_refused(tmp_path: Path) -> None:
    folder = late(tmp_path, IMAGES, where="")
    with pytest.raises(
        ConfigError, match=r"no token with the id 301, .* tokenizer_config\.json and added_tokens\.json"
    ):
        make_tokenizer(str(folder), ("vision",), "vision")
    assert make_tokenizer(str(folder), ()).eos == 298  # a language model of it has no images


def test_ids_that_differ_are_refused(tmp_path: Path) -> None:
    folder = late(tmp_path, ())
    config = read(folder, "tokenizer_config.json")
    config["added_tokens_decoder"]["400"] = {"content": "<far>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"gives '<far>' the id 303, other files of the folder 400; save_pretrained"):
        make_tokenizer(str(folder), ())
    config["added_tokens_decoder"] = {"x": {"content": "<far>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"an added token with the id 'x'; get them again"):
        make_tokenizer(str(folder), ())


def test_the_file_counts_where_tokens_are_compared(tmp_path: Path) -> None:
    """A cache of lengths is made again when the list changes."""
    folder = late(tmp_path, IMAGES, where="added_tokens.json")
    before = tokenizer_digest(str(folder))
    (folder / "added_tokens.json").write_text("{}")
    assert tokenizer_digest(str(folder)) != before
