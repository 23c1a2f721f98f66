"""Messages that are to be answered: prompts are those of transformers to the token, media are named as in records."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_talks import FOLDER, TALKS, template, tokenizer

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.loader import make_source
from mmjax.data.messages import parse_messages, write_messages
from mmjax.data.sample import prompt_only
from mmjax.data.sources.config import PROMPTS, SourceConfig
from mmjax.data.spec import DataSpec
from mmjax.data.types import EncoderSpec, Sample

VISION = EncoderSpec(patch=4, merge=2, channels=3)


def prompts(folder: Path, messages: Any, name: str, **settings: Any) -> list[Sample]:
    """Messages as `mmjax.generate` reads them, with the template `name` of ``oracles/make_talks``."""
    model = folder / "model"
    shutil.copytree(FOLDER, model, dirs_exist_ok=True)
    (model / "chat_template.jinja").write_text(TALKS["templates"][name])
    text = "\n".join(map(json.dumps, messages))
    write_messages(parse_messages(text, "--messages"), folder / "m.jsonl", str(folder), "--messages")
    config = SourceConfig(
        kind=PROMPTS, path=str(folder / "m.jsonl"), media=str(folder), strict=True, template="folder", **settings
    )
    data = DataConfig(sources={"messages": 1.0}, tokenizer=str(model), cache=str(folder / "cache"))
    source: Any = make_source(DataSpec(data, sources={"messages": config}), {"vision": VISION}, seed=0, split="test")
    return [source.sample(at) for at in range(len(source))]


@pytest.mark.parametrize("name", ["lines", "blank", "thinking", "marked"])
def test_prompts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Templates whose prompts end in new lines or a blank, which join the beginning of an answer; tools and calls."""
    records, ids = TALKS["records"], TALKS["ids"][name]
    which = ["plain", "two_users", "answer_first", "late_system", "blanks"]
    which += ["call", "used", "used_twice"] if name in ("thinking", "marked") else []
    dialogues = [{**records[index], "messages": records[index]["messages"][:-1]} for index in which]
    for sample, index in zip(prompts(tmp_path, dialogues, name), which, strict=True):
        assert sample.tokens.tolist() == prompt_only(sample).tokens.tolist() == ids[index]["prompt"]
        assert sample.prompt == len(sample.tokens) and not sample.loss_weights.any() and not sample.answer


def test_a_prompt_of_new_lines_is_one_token() -> None:
    """The tokenizer has a token of two new lines, which no text that goes on has."""
    ids = TALKS["ids"]["lines"]["plain"]
    lines = tokenizer().encode("\n\n")
    assert len(lines) == 1 and ids["prompt"][-1] == lines[0] and lines[0] not in ids["ids"]
    assert template("lines").reads("tool_calls") is False


def test_what_a_template_puts_around_an_answer_is_known_before_it(tmp_path: Path) -> None:
    (sample,) = prompts(tmp_path, [[{"role": "user", "content": "q"}]], "thinking")
    assert (sample.lead, sample.tail, sample.question) == ("<think>\n\n</think>\n\n", "", "q")
    (sample,) = prompts(tmp_path, [[{"role": "user", "content": "q"}]], "lines", system="Be brief.")
    assert (
        tokenizer().shown(sample.tokens.tolist()) == "system:\n\nBe brief.<|im_end|>user:\n\nq<|im_end|>assistant:\n\n"
    )


def test_media_of_messages(tmp_path: Path) -> None:
    """Names, absolute paths, file: and data: URLs."""
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    code = base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    names = ["a.png", f"{tmp_path}/a.png", f"file://{tmp_path}/a.png", f"data:image/png;base64,{code}"]
    parts = [{"type": "image_url", "image_url": {"url": name}} for name in names]
    dialogues = [[{"role": "user", "content": [part, {"type": "text", "text": "the <image> tag?"}]}] for part in parts]
    beside: list[Any] = [{"images": [name], "messages": [{"role": "user", "content": "<image>?"}]} for name in names]
    samples = prompts(tmp_path, [*dialogues, *beside], "marked", max_patches=0)
    assert all(prompt_only(sample).media["vision"] == sample.media["vision"] for sample in samples)
    assert len(samples) == 8 and all((sample.media["vision"][0] == [1, 0, 0]).all() for sample in samples)
    assert "the <image> tag?" in tokenizer().shown(samples[0].tokens.tolist())
    for name, reason in (("/etc/passwd", "leads out of the folder"), ("b.png", "does not exist")):
        message = {"role": "user", "content": [{"type": "image", "image": name}]}
        with pytest.raises(ConfigError, match=f"^--messages: turn 1: .*{reason}"):
            write_messages([[message]], tmp_path / "m.jsonl", str(tmp_path), "--messages")


def test_the_last_message_is_answered() -> None:
    tool = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}]
    assert parse_messages(json.dumps(tool), "--messages") == [tool]
    with pytest.raises(ConfigError, match="the last message is from 'assistant'; end with one from 'user'"):
        parse_messages(json.dumps(tool[:2]), "--messages")
