"""Dialogues of odd structure: token ids and masks are those of transformers (``oracles/make_talks``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax.data.chat import TEMPLATES
from mmjax.data.processor.template import FolderTemplate, read_template
from mmjax.data.sample import answer_text, encode_dialogue, prompt_only
from mmjax.data.sources.record import Media, Record, Turn, Unusable, parse_record
from mmjax.data.tokenizer import ByteTokenizer, FileTokenizer, make_tokenizer
from mmjax.data.types import EncoderSpec, Sample

pytest.importorskip("tokenizers")

FOLDER = Path(__file__).parents[1] / "oracles" / "talks"
TALKS: Mapping[str, Any] = json.loads((FOLDER / "dialogues.json").read_text("utf-8"))
CASES = [(name, which) for name, ids in TALKS["ids"].items() for which in ids]
CALLS = ("call", "call_without_content", "used", "used_twice")
UNWRITTEN = [(name, which) for name in ("lines", "blank") for which in (*CALLS, "thoughts", "old_thoughts")]
UNWRITTEN += [("marked", "thoughts"), ("marked", "old_thoughts"), ("turns", "thoughts"), ("turns", "old_thoughts")]
UNWRITTEN += [("turns", "call")]
"""transformers leaves tools, calls and thoughts out where a template does not write them."""


@cache
def tokenizer() -> FileTokenizer:
    tokenizer_ = make_tokenizer(str(FOLDER), ("vision",), "vision")
    assert isinstance(tokenizer_, FileTokenizer)
    return tokenizer_


@cache
def template(name: str) -> FolderTemplate:
    tokens = read_template(str(Path(FOLDER).parent / "processors" / "chatml")).tokens
    return FolderTemplate(place=f"{name}.jinja", source=TALKS["templates"][name], tokens=tokens)


def no_media(name: object, kind: str) -> Media:
    raise Unusable(f"{kind} {name} is not there")


def laid(name: str, record: Record) -> Any:
    settings: Any = {"template": template(name), "system": record.system, "tools": record.tools}
    return encode_dialogue(tokenizer(), {}, {}, record.dialogue, **settings)


@pytest.mark.parametrize(("name", "which"), CASES)
def test_tokens_prompts_and_masks(name: str, which: str) -> None:
    wanted, value = TALKS["ids"][name][which], TALKS["records"][which]
    record = parse_record(value, no_media)
    if "refused" in wanted or (name, which) in UNWRITTEN:
        with pytest.raises(ValueError, match=r"take turns|no attribute|does not write|has no such role"):
            laid(name, record)
        return
    dialogue = laid(name, record)
    assert dialogue.tokens == wanted["ids"]
    prompt = list(dialogue.prompt_tokens) or dialogue.tokens[: dialogue.prompt]
    assert prompt == wanted["prompt"]
    if which != "two_answers":
        unanswered = parse_record({**value, "messages": value["messages"][:-1]}, no_media, is_prompt=True)
        assert laid(name, unanswered).tokens == prompt
    if "mask" in wanted:
        assert dialogue.weights == wanted["mask"]
    learned = [token for token, weight in zip(dialogue.tokens, dialogue.weights, strict=True) if weight]
    answers = [turn for turn in record.dialogue if turn.is_answer]
    assert learned.count(tokenizer().eos) == len(answers)
    text = tokenizer().shown(learned)
    assert all(turn.text.strip() in text for turn in answers)
    assert text.count("<tool_call>") == sum(len(turn.keys.get("tool_calls", ())) for turn in answers)
    assert "done" not in text and "zoom in" not in text and "Be brief" not in text


@pytest.mark.parametrize("name", ["thinking", "marked", "lines"])
@pytest.mark.parametrize(("keys", "weight"), [({"loss": False}, 0.0), ({"weight": 0.25}, 0.25)])
def test_a_turns_weight_is_that_of_its_tokens(name: str, keys: dict[str, Any], weight: float) -> None:
    """The tokens are those of all turns; the end token of a masked answer is masked with it."""
    system, first, answer, *later = TALKS["records"]["plain"]["messages"]
    dialogue = laid(name, parse_record({"messages": [system, first, {**answer, **keys}, *later]}, no_media))
    plain = laid(name, parse_record(TALKS["records"]["plain"], no_media))
    assert dialogue.tokens == plain.tokens == TALKS["ids"][name]["plain"]["ids"]
    changed = [at for at, (a, b) in enumerate(zip(dialogue.weights, plain.weights, strict=True)) if a != b]
    assert {plain.weights[at] for at in changed} == {1.0} and {dialogue.weights[at] for at in changed} == {weight}
    assert changed == [*range(changed[0], changed[-1] + 1)]
    assert tokenizer().shown([dialogue.tokens[at] for at in changed]) == "a cat<|im_end|>"


@pytest.mark.parametrize("name", ["thinking", "marked"])
def test_the_last_answer_is_the_last_that_is_learned(name: str) -> None:
    """In an evaluation the model answers there, and turns behind it are not asked."""
    messages = TALKS["records"]["plain"]["messages"]
    masked = {"messages": [*messages[:-1], {**messages[-1], "loss": False}]}
    dialogue, short = (
        laid(name, parse_record(masked, no_media)),
        laid(name, parse_record({"messages": messages[:3]}, no_media)),
    )
    prompt_tokens = list(dialogue.prompt_tokens) or dialogue.tokens[: dialogue.prompt]
    assert prompt_tokens == (list(short.prompt_tokens) or short.tokens[: short.prompt])
    learned = [token for token, weight in zip(dialogue.tokens, dialogue.weights, strict=True) if weight]
    assert tokenizer().shown(learned) == "a cat<|im_end|>"


@pytest.mark.parametrize(("name", "which"), [("thinking", "call"), ("thinking", "thoughts"), ("marked", "call")])
def test_calls_and_thoughts_are_a_part_of_the_answer(name: str, which: str) -> None:
    """As the right answer of an evaluation and in what the model says."""
    record = parse_record(TALKS["records"][which], no_media)
    dialogue = laid(name, record)
    assert dialogue.answer.startswith("\n<tool_call>" if name == "marked" else "<think>\n")
    assert dialogue.answer.endswith("</tool_call>" if which == "call" else "a cat")
    sample = Sample(
        tokens=np.asarray(dialogue.tokens), loss_weights=np.asarray(dialogue.weights), media={}, question="", answer="",
        prompt=dialogue.prompt, prompt_tokens=np.asarray(dialogue.prompt_tokens), lead=dialogue.lead,
        tail=dialogue.tail,
    )  # fmt: skip
    assert not dialogue.prompt_tokens and prompt_only(sample).tokens.tolist() == TALKS["ids"][name][which]["prompt"]
    end = dialogue.tokens.index(tokenizer().eos, dialogue.prompt)
    assert answer_text(tokenizer(), sample, dialogue.tokens[dialogue.prompt : end]) == dialogue.answer


def test_places_of_media_in_calls_and_tools_are_refused() -> None:
    """What stands for an image in a template's text comes from the dialogue's images alone."""
    image = FolderTemplate(place="t", source=TALKS["templates"]["marked"], image="<|endoftext|>")
    call = {"function": {"name": "<|endoftext|>"}}
    turns = [Turn(role="user", text="q"), Turn(role="assistant", text="", keys={"tool_calls": [call]})]
    with pytest.raises(ValueError, match="more places of media than there are media"):
        encode_dialogue(tokenizer(), {"vision": EncoderSpec(patch=1)}, {}, turns, template=image)


def test_a_role_is_written_by_templates_that_know_it() -> None:
    source = TALKS["templates"]["lines"].replace(
        "message.role + ", "(message.role if message.role == 'user' else 'x') + "
    )
    turns = [Turn(role="user", text="q"), Turn(role="tool", text="t"), Turn(role="assistant", text="a")]
    assert "tool:\n\nt" in template("lines").render(turns).text
    with pytest.raises(ValueError, match="turn 2 is from 'tool', and t has no such role"):
        FolderTemplate(place="t", source=source).render(turns)


def test_named_templates_write_no_calls() -> None:
    call = Turn(role="assistant", text="", keys={"tool_calls": [{"function": {"name": "f"}}]})
    for named in TEMPLATES.values():
        with pytest.raises(ValueError, match="turn 2 has tool_calls, which the template of a folder alone"):
            encode_dialogue(ByteTokenizer(()), {}, {}, [Turn(role="user", text="q"), call], template=named)
