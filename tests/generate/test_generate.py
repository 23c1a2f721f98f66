"""The command that answers messages: tokens of transformers, and of the plain reference, under layouts and by seed."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.drawn_videos import VIDEOS, named_video
from PIL import Image
from trial_runs import REPOSITORY
from video_files import write_video

from mmjax.generate.__main__ import main

FOLDER = Path(__file__).parents[1] / "oracles" / "llava"
BYTES = "--gin.Data.tokenizer="
TEXTS: Sequence[Sequence[str | int]] = (
    (0, "What is it?"),
    ("Tell me of the sea and of the ships that are on it, please.",),
    ("Is ", 1, "as red as ", 2, "?"),
)
"""The prompts of ``oracles/make_generated.py``; numbers are images."""
LLMS = (
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2_lite",
    "deepseek_v3",
    "qwen3_5_text",
    "gemma2",
    "gemma4_text",
    "gemma4_moe",
    "gemma4_shared",
    "gemma4_per_layer",
    "gemma3_text",
    "smollm3",
    "olmo2",
    "olmo3",
    "phi3",
)
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:"
SAID, END = "What do you see: the sea.", 1


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


PROCESSED = ("--gin.messages/Source.preset=llava15", "--gin.messages/Source.size=(28, 28)")
"""What the processor of the golden's folder, which has none, would say."""


def of_folder(messages: Path, *flags: str) -> list[str]:
    return [f"--weights={FOLDER}", f"--messages={messages}", BYTES, *PROCESSED, *flags]


LAYOUTS = {
    "one device": (),
    "dp, tp and pp": (
        *("--gin.llm/Layout.tp=2", "--gin.llm/Layout.pp=2", "--gin.llm/Layout.dp=2"),
        *("--gin.vision/Layout.dp=2", "--gin.vision/Layout.tp=2", "--gin.Train.unroll=True"),
    ),
}


@pytest.mark.long
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


WHOLES = {
    **{"llava": "llava", "llava_onevision": "llava_onevision", "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_vl"},
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen3_vl"),
    **{name: name for name in ("gemma3", "gemma4", "llava_next", "llava_next_mistral")},
}
"""Whole models, and the folders of their processors."""


SHORT = [("llava_onevision", "one device")]
"""Cases of `make test`."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in SHORT else [pytest.mark.long])
        for name in WHOLES
        for layout in LAYOUTS
    ],
)
def test_a_whole_folder_answers_as_it_does_there(
    name: str, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its own tokenizer, chat template and rules for images, from files, and nothing but the folder's name."""
    oracles = FOLDER.parent
    for place in (oracles / "processors" / WHOLES[name], oracles / "generated" / name):
        shutil.copytree(place, tmp_path / "model", dirs_exist_ok=True)
    for file in ("odd.png", "turned.jpg"):
        shutil.copy(oracles / "processors" / file, tmp_path)
    messages = shutil.copy(oracles / "generated" / "messages.jsonl", tmp_path)
    want = np.load(oracles / "generated" / name / "values.npz")
    found = said(capsys, f"--weights={tmp_path / 'model'}", f"--messages={messages}", *LAYOUTS[layout])
    assert len(found) == 3
    ends = json.loads((oracles / "generated" / name / "generation_config.json").read_text())["eos_token_id"]
    for number, answer in enumerate(found):
        tokens = want[f"tokens_{number}"].tolist()
        count = len(tokens) - (tokens[-1] in (ends if isinstance(ends, list) else [ends]))  # without the end token
        assert answer["tokens"] == tokens[:count]
        np.testing.assert_allclose(answer["logprobs"], want[f"logprobs_{number}"][:count], rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS])
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe"])
def test_a_whole_folder_answers_about_videos(
    name: str, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From files, with the folder's rules for videos; an image and an answer before a video too.

    The folders of Qwen2-VL and Qwen2.5-VL have no rules for videos but those for images, as the published ones.
    """
    pytest.importorskip("av")
    oracles, videos = FOLDER.parent, FOLDER.parent / "video"
    if name.startswith("qwen2"):
        places = (oracles / "processors" / "qwen2_vl", oracles / "generated" / name, videos / "positions")
    else:
        places = (
            *(oracles / "processors" / "qwen3_vl", videos / "folder"),
            *(oracles / "generated" / name, videos / "answers"),
        )
    for place in places:
        shutil.copytree(place, tmp_path / "model", dirs_exist_ok=True)
    shutil.copy(oracles / "processors" / "odd.png", tmp_path)
    for video in ("odd", "small"):
        write_video(tmp_path / f"{video}.mkv", named_video(video), VIDEOS[video][3], lossless=True)
    messages, want = shutil.copy(videos / "messages.jsonl", tmp_path), np.load(videos / "answers.npz")
    limit = ("--max_tokens=24", *LAYOUTS[layout])
    found = said(capsys, f"--weights={tmp_path / 'model'}", f"--messages={messages}", *limit)
    assert len(found) == 2
    for number, answer in enumerate(found):
        tokens = want[f"{name}/tokens_{number}"].tolist()
        count = len(answer["tokens"])
        assert count >= len(tokens) - 1 and answer["tokens"] == tokens[:count]
        np.testing.assert_allclose(answer["logprobs"], want[f"{name}/logprobs_{number}"][:count], rtol=0, atol=1e-4)


def test_a_missing_video_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oracles = FOLDER.parent
    for place in (oracles / "video" / "folder", oracles / "generated" / "qwen3_vl"):
        shutil.copytree(place, tmp_path / "model", dirs_exist_ok=True)
    messages = tmp_path / "messages.json"
    video = {"type": "video", "video": "none.mp4"}
    messages.write_text(json.dumps([{"role": "user", "content": [video, {"type": "text", "text": "What?"}]}]))
    with pytest.raises(SystemExit):
        main([f"--weights={tmp_path / 'model'}", f"--messages={messages}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "video 'none.mp4' does not exist: put it at" in line


SPREAD = {
    "tp and pp": ("--gin.llm/Layout.tp=2", "--gin.llm/Layout.pp=2"),
    "cp": ("--gin.llm/Layout.cp=2", "--gin.llm/Layout.tp=2", "--gin.llm/Layout.sp=False"),
    "sharded": ("--gin.llm/Layout.dp=2", "--gin.llm/Layout.shard='parameters'"),
}
IN_ORDER = {"cp": ("--gin.llm/Layout.cp_tokens='contiguous'",), "tp and pp": ("--gin.Train.unroll=True",)}
"""What a layout needs, or has besides, where delta layers go from token to token."""
ALONE = [LLMS[0], *(pytest.param(name, marks=pytest.mark.long) for name in LLMS[1:-1]), LLMS[-1]]


@pytest.mark.long
@pytest.mark.parametrize("layout", SPREAD)
def test_latent_attention_says_the_same_under_layouts(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With whole keys and values of each rank's heads in the cache."""
    require_words("deepseek_v3", tmp_path, capsys, *SPREAD[layout])


@pytest.mark.long
@pytest.mark.parametrize("layout", SPREAD)
def test_delta_layers_say_the_same_under_layouts(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the state of each rank's heads in the cache, and the last tokens of convolutions."""
    require_words("qwen3_5_text", tmp_path, capsys, *SPREAD[layout], *IN_ORDER.get(layout, ()))


@pytest.mark.long
@pytest.mark.parametrize("name", ALONE)
def test_a_language_model_alone_says_what_it_says_there(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With windows that the text outgrows, norms of queries and keys, a tied head, experts, latent attention, and
    states of delta layers.
    """
    require_words(name, tmp_path, capsys)


def require_words(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *layout: str) -> None:
    folder = FOLDER.parent / "llm"
    want = np.load(folder / "generated.npz")[name].tolist()
    path = tmp_path / "m.json"
    path.write_text(json.dumps([{"role": "user", "content": SAID}]))
    flags = [f"--weights={folder / name}", f"--messages={path}", f"--gin.Data.tokenizer={letters(tmp_path)}"]
    (found,) = said(capsys, *flags, *layout, "--max_tokens=32")
    assert found["tokens"] == [token for token in want if token != END] and len(want) > 5


def letters(folder: Path) -> Path:
    """A tokenizer of single characters, as `oracles/make_generated.py` has it."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", "<unk>", *CHARACTERS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


# ---- a run's model ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_answers_messages_on_its_devices(
    tiny_run: Path, messages: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several prompts side by side or one alone, from a file or standard input: the same answers."""
    together = said(capsys, f"--run_dir={tiny_run}", f"--messages={messages}", "--max_tokens=5")
    assert len(together) == len(TEXTS) and all(len(one["logprobs"]) == len(one["tokens"]) <= 5 for one in together)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked(TEXTS[2]))))
    monkeypatch.chdir(messages.parent)
    one_device = ("--gin.llm/Layout.tp=1", "--gin.vision/Layout.dp=1", "--gin.vision/Layout.rank_offset=0")
    run = tiny_run if tiny_run.is_absolute() else Path(__file__).parents[2] / tiny_run
    (alone,) = said(capsys, f"--run_dir={run}", "--messages=-", "--max_tokens=5", *one_device)
    assert alone["tokens"] == together[2]["tokens"]
    np.testing.assert_allclose(alone["logprobs"], together[2]["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.long
def test_chance_is_that_of_the_seed(messages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text that is printed as it comes is the text of ``--json``, under another layout too."""
    flags = of_folder(messages, "--max_tokens=12", "--temperature=1.5", "--top_p=0.95")
    first = said(capsys, *flags, "--seed=3")
    assert main([*flags, "--seed=3", *LAYOUTS["dp, tp and pp"]]) == 0
    assert capsys.readouterr().out == "".join(one["text"] + "\n" for one in first)
    other = said(capsys, *flags, "--seed=4")
    assert all(one["tokens"] != again["tokens"] for one, again in zip(first, other, strict=True))


@pytest.mark.slow
def test_two_processes_answer_as_one(messages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The encoder in one, the language model in both; the first prints."""
    flags = of_folder(messages, "--max_tokens=8", "--json")
    layout = ("--gin.llm/Layout.pp=2", "--gin.World.devices=2")
    command = [sys.executable, "-m", "mmjax.launch", "-n", "2", "-m", "mmjax.generate", *flags, *layout]
    own = ("JAX_NUM_CPU_DEVICES", "NPROC")  # what several processes set themselves
    env = {name: value for name, value in os.environ.items() if name not in own} | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=REPOSITORY, env=env)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[0] {")]
    assert len(lines) == len(done.stdout.splitlines())
    for line, alone in zip(map(json.loads, lines), said(capsys, *flags), strict=True):
        assert line["tokens"] == alone["tokens"] and line["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-5)


# ---- errors ----------------------------------------------------------------------------------------------------------

ONE = '[{"role": "user", "content": "Hello"}]'


@pytest.mark.parametrize(
    ("text", "flags", "line"),
    [
        ("", [], "is empty; write a list such as"),
        ("{", [], "line 1 is not JSON (Expecting property name"),
        ("7", [], "must be a list of messages, not int"),
        (f"{ONE}\n[]", [], "prompt 2: must be a list of messages, not an empty list"),
        ('[{"role": "assistant", "content": "Hi"}]', [], "the last message is from 'assistant'; end with one from"),
        ('[{"role": "user", "content": 7}]', [], "turn 1: content=7 must be a string"),
        (
            '[{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]',
            [],
            "turn 2 is from 'tool', which",
        ),
        ('[{"role": "system", "content": "a"}]', [], "the dialogue has no question"),
        (
            f'{{"messages": {ONE}, "tools": [{{"name": "f"}}]}}',
            [],
            "it has tools, which the template of a folder",
        ),
        (
            '[{"role": "user", "content": [{"type": "image", "image": "none.png"}]}]',
            [],
            "turn 1: image 'none.png' does not exist: put it at",
        ),
        ('[{"role": "user", "content": [{"type": "image", "image": "m.json"}]}]', [], "no JPEG, PNG"),
        (ONE, ["--max_tokens=0"], "--max_tokens=0: must be"),
        (ONE, ["--temperature=hot"], "--temperature=hot: must be a number, such as 0.7"),
        (ONE, ["--temperature=-1"], "--temperature=-1.0: must"),
        (ONE, ["--top_p=0"], "--top_p=0.0: must be above 0 and at most 1"),
        (ONE, ["--seed=-1"], "--seed=-1: must be 0 or more"),
        (ONE, ["--run_dir=runs/x"], "beside --run_dir: name one"),
        (ONE, ["--source=mine"], "--source='mine'"),
        (f'[{{"role": "user", "content": "{"long " * 100}"}}]', [], "the model has positions for 256 tokens"),
    ],
)
def test_errors_are_one_line(
    text: str, flags: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(of_folder(path, *flags))
    found = capsys.readouterr()
    assert end.value.code == 2 and not found.out and found.err.count("\n") == 1
    assert found.err.startswith("error: ") and line in found.err
    assert "/messages.jsonl" not in found.err


def test_what_has_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    path.write_text(ONE)
    llm = FOLDER.parent / "llm"
    for flags, line in (
        ([], "--run_dir and --weights are missing: name one"),
        ([f"--run_dir={tmp_path}"], "holds no config.gin"),
        ([f"--weights={tmp_path}"], f"--weights={str(tmp_path)!r}: "),
        ([f"--weights={FOLDER}"], "has no tokenizer.json; name one with --gin.Data.tokenizer=FILE"),
        ([f"--weights={next(llm.iterdir())}"], "--weights="),
    ):
        with pytest.raises(SystemExit):
            main([f"--messages={path}", *flags])
        assert line in capsys.readouterr().err
