"""Recordings of messages: WAV files of a tiny run, the same under two layouts, and what is no such message."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest
from painted_runs import CAPTIONED

from mmjax.assembly.vocoders import Recording
from mmjax.config import load_config, load_run_config
from mmjax.configurable import ConfigError
from mmjax.data.messages import parse_messages
from mmjax.data.picture_prompts import sizes_of
from mmjax.generate.__main__ import main
from mmjax.generate.pictures import draw_pictures
from mmjax.train.trainer import Trainer

pytest.importorskip("soundfile")
RATE = 4000
RUN = f"""{CAPTIONED}
Model.generators = {{'talker': 'sound-dit'}}
talker/SoundDiT.layers = 2
talker/SoundDiT.width = 16
talker/SoundDiT.heads = 2
talker/SoundDiT.mlp = 24
talker/SoundDiT.mels = 12
talker/SoundDiT.patch = 3
talker/SoundDiT.steps = 4
talker/SoundDiT.sample_rate = 4000
talker/SoundDiT.window = 128
talker/SoundDiT.hop = 40
talker/Vocoder.iterations = 2
talker/Layout.pp = 2
talker/Layout.rank_offset = 2
Train.eval_samples = 2
"""
ONE_DEVICE = ("llm/Layout.pp=1", "talker/Layout.pp=1", "talker/Layout.rank_offset=0")
PROMPT = json.dumps([{"role": "user", "content": "low"}])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that is trained on tones and their names."""
    folder = tmp_path_factory.mktemp("sounds")
    (folder / "tones").mkdir()
    for number in range(8):
        name, hertz = (("low", 300), ("high", 1200))[number % 2]
        samples = 0.5 * np.sin(2 * np.pi * hertz * np.arange(400 + 20 * number) / RATE)
        Recording(samples, RATE).write(folder / "tones" / f"{number}.wav")
        (folder / "tones" / f"{number}.txt").write_text(name)
    (folder / "run.gin").write_text(RUN)
    paths = [f"mine/Source.path={str(folder / 'tones')!r}", f"Data.cache={str(folder / 'cache')!r}"]
    with Trainer(load_config([folder / "run.gin"], paths), folder / "run", style="silent") as trainer:
        trainer.train()
    return folder / "run"


@pytest.mark.long
def test_files_of_a_run_and_its_evaluation(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = run_dir / "prompts.json"
    prompts.write_text(PROMPT)
    flags = (f"--run_dir={run_dir}", f"--messages={prompts}", "--generate_seconds=0.13", f"--out={run_dir / 'out'}")
    assert main([*flags, "--samples=2", "--json"]) == 0
    paths = json.loads(capsys.readouterr().out)["pictures"]
    assert [Path(path).name for path in paths] == ["1-1.wav", "1-2.wav"]
    for path in paths:
        with wave.open(path) as file:
            assert file.getparams()[:4] == (1, 2, RATE, 13 * 40)  # 0.13 seconds are 13 frames
    assert Path(paths[0]).read_bytes() != Path(paths[1]).read_bytes()
    row = json.loads((run_dir / "eval.jsonl").read_text().splitlines()[-1])
    assert list(row["talker_losses"]) == ["0.1", "0.3", "0.5", "0.7", "0.9"]
    assert (run_dir / "drawings.png").stat().st_size > 0


@pytest.mark.long
def test_recordings_are_the_same_under_two_layouts(run_dir: Path) -> None:
    dialogue = [
        {"role": "user", "content": "low"},
        {"role": "assistant", "content": [{"type": "audio", "generate": True, "seconds": 0.1}]},
    ]
    made = [
        draw_pictures(load_run_config(run_dir, [], changes), run_dir, [dialogue], seed=3, style="silent")[0][0][0]
        for changes in ((), ONE_DEVICE)
    ]
    assert all(isinstance(recording, Recording) for recording in made)
    first, second = (np.asarray(recording.samples) for recording in made if isinstance(recording, Recording))
    np.testing.assert_allclose(first, second, atol=1e-3 * np.abs(first).max())


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--generate_seconds=0", "--out=x"), "--generate_seconds='0': must be seconds of a recording, such as 1.5"),
        (("--generate_seconds=a", "--out=x"), "--generate_seconds=a: must be a number"),
        (("--generate_seconds=1",), "--out='': is missing: messages ask for pictures or recordings"),
        (("--generate_seconds=1", "--generate_size=8x8"), "--generate_size='8x8': stands beside --generate_seconds"),
    ],
)
def test_wrong_flags(flags: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.json").write_text(PROMPT)
    with pytest.raises(SystemExit) as done:
        main([f"--run_dir={tmp_path}", f"--messages={tmp_path / 'prompts.json'}", *flags])
    assert done.value.code == 2 and line in capsys.readouterr().err


def test_a_message_names_its_seconds() -> None:
    text = json.dumps(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "audio", "generate": True}]}]
    )
    (dialogue,) = parse_messages(text, "--messages=a.json")
    with pytest.raises(ConfigError, match="seconds=None: write those of a recording"):
        sizes_of(dialogue, None, "--messages=a.json")
