"""The command that answers messages: tokens of transformers, and of the plain reference, under layouts and by seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmjax.generate import main

FOLDER = Path(__file__).parent / "oracles" / "llava"
BYTES = "--gin.Data.tokenizer="
TEXTS: Sequence[Sequence[str | int]] = (
    (0, "What is it?"),
    ("Tell me of the sea and of the ships that are on it, please.",),
    ("Is ", 1, "as red as ", 2, "?"),
)
"""The prompts of ``oracles/make_generated.py``; numbers are images."""


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "generated.npz"))


@pytest.fixture
def messages(golden: Mapping[str, np.ndarray], tmp_path: Path) -> Path:
    """The golden's prompts as JSONL beside its images."""
    for number, pixels in enumerate(golden["pixels"]):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    path = tmp_path / "messages.jsonl"
    path.write_text("".join(json.dumps(asked(text)) + "\n" for text in TEXTS))
    return path


def asked(parts: Sequence[str | int]) -> list[dict[str, Any]]:
    """A prompt as transformers takes it."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": f"{part}.png"}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def said(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    """What the command prints with ``--json``."""
    assert main([*flags, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def of_folder(messages: Path, *flags: str) -> list[str]:
    return [f"--weights={FOLDER}", f"--messages={messages}", BYTES, *flags]


LAYOUTS = {
    "one device": (),
    "dp, tp and pp": (
        *("--gin.llm/Layout.tp=2", "--gin.llm/Layout.pp=2", "--gin.llm/Layout.dp=2"),
        *("--gin.vision/Layout.dp=2", "--gin.vision/Layout.tp=2", "--gin.Train.unroll=True"),
    ),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.long] if number else []) for number, name in enumerate(LAYOUTS)]
)
def test_tokens_are_those_of_transformers(
    layout: str, golden: Mapping[str, np.ndarray], messages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, *of_folder(messages, *LAYOUTS[layout]))
    assert len(found) == len(TEXTS)
    for number, answer in enumerate(found):
        assert answer["tokens"] == golden[f"tokens_{number}"].tolist()
        np.testing.assert_allclose(answer["logprobs"], golden[f"logprobs_{number}"], rtol=0, atol=2e-5)
        assert answer["text"] == bytes(t for t in answer["tokens"] if t < 256).decode(errors="replace")
