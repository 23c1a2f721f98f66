"""Pictures out of the command: those of the dense reference, under layouts, by seed; and messages that ask for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from painted_runs import painted_run
from PIL import Image
from trial_runs import leaves

from mmjax.assembly.model import build_model
from mmjax.config import load_run_config
from mmjax.data.loader import tokenizer_of
from mmjax.data.messages import write_messages
from mmjax.data.picture_prompts import ends_with_picture, with_blanks, with_picture
from mmjax.generate.__main__ import main
from mmjax.generate.messages import for_pictures
from mmjax.reference import draw
from mmjax.reference.positions import cut_patches

pytestmark = pytest.mark.long

PROMPTS = [[{"role": "user", "content": text}] for text in ("red", "a green one, please")]
ONE_DEVICE = ("--gin.llm/Layout.pp=1", "--gin.painter/Layout.pp=1", "--gin.painter/Layout.rank_offset=0")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on pictures of colours."""
    return painted_run(tmp_path_factory.mktemp("painted"))


def asked(folder: Path, prompts: Sequence[Any] = PROMPTS) -> str:
    path = folder / "messages.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return f"--messages={path}"


def drawn(capsys: pytest.CaptureFixture[str], *flags: str) -> list[list[np.ndarray]]:
    """The pictures that the command prints with ``--json``, by prompt."""
    assert main([*flags, "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(answer["text"] == "" and answer["tokens"] == [] for answer in answers)
    return [[np.asarray(Image.open(path)) for path in answer["pictures"]] for answer in answers]


def test_pictures_are_the_references_under_layouts(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With guidance, from the same noise for each prompt, whatever is asked beside it."""
    flags = (f"--run_dir={run}", "--seed=5", "--guidance=2.5", "--generate_size=8x12")
    split = drawn(capsys, *flags, asked(tmp_path), f"--out={tmp_path / 'split'}", "--samples=2")
    assert sorted(path.name for path in (tmp_path / "split").iterdir()) == ["1-1.png", "1-2.png", "2-1.png", "2-2.png"]
    assert not np.array_equal(split[0][0], split[0][1]) and not np.array_equal(split[0][0], split[1][0])
    alone = drawn(capsys, *flags, asked(tmp_path, PROMPTS[1:]), f"--out={tmp_path / 'alone'}", *ONE_DEVICE)
    np.testing.assert_allclose(alone[0][0].astype(int), split[1][0], atol=1)

    recipe = load_run_config(run, [], ["painter/DiT.guidance=2.5"])
    records = [with_blanks(with_picture(prompt, (8, 12)), [(8, 12)]) for prompt in PROMPTS]
    write_messages(records, tmp_path / "r.jsonl", ".", "x", is_prompt=False)
    prompts = for_pictures(recipe, str(tmp_path / "r.jsonl"), media=".", cache=str(tmp_path))
    model = build_model(recipe, tokenizer_of(recipe.data.settings, recipe.model.media))
    params = {name.removeprefix("params/"): leaf for name, leaf in leaves(run, 2).items() if name.startswith("params/")}
    for prompt, sample in enumerate(prompts.samples()):
        for number in range(2):
            noise = np.random.default_rng([5, number]).standard_normal((8, 12, 3), np.float32)
            sample.noise["painter"] = (noise,)  # type: ignore[index]
            (want,) = draw(params, model, sample, "painter")
            got = split[prompt][number].astype(np.float64) / 127.5 - 1
            np.testing.assert_allclose(cut_patches(got, 2, 2), np.clip(want, -1, 1), atol=1.1 / 255)


def test_a_message_asks_for_pictures_of_its_own_sizes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two in one answer with words before them; one that names no size has that of the run's data."""
    part = {"type": "image", "generate": True}
    both = [{"type": "text", "text": "Here: "}, {**part, "height": 4, "width": 8}, part]
    messages = [*PROMPTS[0], {"role": "assistant", "content": both}]
    ((first, second),) = drawn(
        capsys, f"--run_dir={run}", asked(tmp_path, [messages]), f"--out={tmp_path / 'out'}", "--steps=2", *ONE_DEVICE
    )
    assert (first.shape, second.shape) == ((4, 8, 3), (8, 8, 3))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["1-1-1.png", "1-1-2.png"]


def test_a_dialogue_asks_for_a_picture_at_its_end_alone() -> None:
    assert ends_with_picture(with_picture(PROMPTS[0], (4, 4)))
    assert not ends_with_picture(PROMPTS[0])
    assert not ends_with_picture([*PROMPTS[0], {"role": "assistant", "content": "no"}])
    tools = {"messages": PROMPTS[0], "tools": [{"name": "x"}]}
    assert with_blanks(with_picture(tools, (4, 4)), [(4, 4)])["tools"] == [{"name": "x"}]


MADE = {"role": "assistant", "content": [{"type": "image", "generate": True, "height": 6, "width": 8}]}


@pytest.mark.parametrize(
    ("prompts", "flags", "line"),
    [
        (PROMPTS, ("--out=x",), "--out='x': no message ends with a picture to be made; leave it out"),
        (PROMPTS, ("--steps=5",), "--steps=5: no message ends with a picture to be made"),
        (
            PROMPTS,
            ("--generate_size=8x8",),
            "--out='': is missing: messages ask for pictures or recordings; name a directory",
        ),
        (PROMPTS, ("--generate_size=8", "--out=x"), "--generate_size='8': must be height x width in pixels"),
        ([[*PROMPTS[0], MADE], PROMPTS[1]], ("--out=x",), "some prompts are answered by text and some by pictures"),
        (
            [[*PROMPTS[0], MADE]],
            ("--out=x",),
            "height, width=(6, 8): 'painter' makes multiples of 4 pixels; write 8 and 8",
        ),
        ([[MADE, *PROMPTS[0], MADE]], ("--out=x",), "a picture is to be made before the last message"),
        ([[MADE]], ("--out=x",), "a picture is made of a message before it; write one"),
        (PROMPTS, ("--generate_size=8x8", "--out=x", "--sampler=ddim"), "DiT.sampler='ddim': DiT.process='flow'"),
        (PROMPTS, ("--generate_size=8x8", "--out=x", "--guidance=much"), "--guidance=much: must be a number"),
        (PROMPTS, ("--generate_size=8x8", "--out=x", "--samples=0"), "--samples=0: must be above 0"),
    ],
)
def test_wrong_prompts_for_pictures_are_refused_in_one_line(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    prompts: Sequence[Any],
    flags: Sequence[str],
    line: str,
) -> None:
    path = asked(tmp_path, prompts)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([f"--run_dir={run}", path, *flags])
    (said,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error")]
    assert stopped.value.code == 2 and line in said


def test_a_model_without_a_generator_makes_no_pictures(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([f"--run_dir={tiny_run}", asked(tmp_path), "--generate_size=8x8", f"--out={tmp_path / 'out'}"])
    assert "none of them makes pictures" in capsys.readouterr().err
