"""Command lines and their help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmjax.checkpoint.config import CheckpointError
from mmjax.config import load_config, scopes_of
from mmjax.config.flags import INTERRUPTED, Flag, Flags, one_line_errors, parse_flags, run_command
from mmjax.configurable import ConfigError, gin_name
from mmjax.data.config import DataConfig
from mmjax.fields import fields_of
from mmjax.models.config import ModelConfig

FLAGS = (
    Flag(name="run_dir", doc="where the run's files go."),
    Flag(name="json", doc="prints JSON.", default=False),
    Flag(name="limit", doc="how many.", default=5),
)


def test_files_bindings_and_own_flags() -> None:
    argv = ["--gin_file=a.gin", "--gin_file", "b.gin", "--gin.vision/Layout.tp=2", "--gin.Train.schedule", "gpipe"]
    assert parse_flags([*argv, "--run_dir=runs/x=1", "--json", "--limit=7"], FLAGS) == Flags(
        gin_files=("a.gin", "b.gin"),
        bindings=("vision/Layout.tp=2", "Train.schedule=gpipe"),
        values={"run_dir": "runs/x=1", "json": True, "limit": 7},
    )
    assert parse_flags([], FLAGS).values == {"run_dir": "", "json": False, "limit": 5}
    assert parse_flags(["--json=false"], FLAGS).values["json"] is False


def test_bindings_reach_the_config() -> None:
    flags = parse_flags(["--gin.Train.schedule=gpipe", "--gin.Train.clip_norm", "-0.0", "--gin.Data.tokenizer="])
    config = load_config(flags.gin_files, flags.bindings)
    assert (config.train.schedule, config.data.settings.tokenizer) == ("gpipe", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gin_fil=a"], "--gin_fil=a: no flag --gin_fil; did you mean '--gin_file'?"),
        (["--rundir=a"], "--rundir=a: no flag --rundir; did you mean '--run_dir'?"),
        (["--Train.steps=3"], "--Train.steps=3: no flag --Train.steps; did you mean '--gin.Train.steps'?"),
        (["train"], "'train' is no flag: flags start with --, such as --gin_file=digits_vlm"),
        (["--gin_file"], "--gin_file: a value is missing; write --gin_file=VALUE"),
        (["--gin_file", "--json"], "--gin_file: a value is missing; write --gin_file=VALUE"),
        (["--json=maybe"], "--json=maybe: must be true or false"),
        (["--limit=few"], "--limit=few: must be an integer, such as 5"),
    ],
)
def test_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_flags(argv, FLAGS)
    assert str(error.value) == message


def test_required_flags() -> None:
    flag = Flag(name="run_dir", doc="the run to evaluate.", required=True)
    with pytest.raises(ConfigError, match=r"^--run_dir is missing: the run to evaluate"):
        parse_flags([], [flag])
    assert parse_flags(["--run_dir=x"], [flag]).values == {"run_dir": "x"}


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        parse_flags(["--gin_file=missing.gin", "--help"], FLAGS, "python -m mmjax.eval")
    assert done.value.code == 0
    text = capsys.readouterr().out
    first = text.splitlines()[0]
    assert first.startswith("usage: python -m mmjax.eval [--gin_file=F ...]")
    assert first.endswith("[--run_dir=RUN_DIR] [--json] [--limit=LIMIT]")
    for cls in scopes_of(ModelConfig(), DataConfig()):
        for info in fields_of(cls).values():
            assert f"  {gin_name(cls)}.{info.name} = {info.default!r}" in text
    assert "Layout.tp = 1                         tensor parallel degree." in text
    assert "llama3-8b" in text
    assert max(map(len, text.splitlines()[1:])) <= 120


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done, one_line_errors():
        load_config([], ["Train.stepz=3"])
    assert done.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    message = "Train.stepz=3: Train has no field 'stepz'; did you mean 'steps'? (--gin.Train.stepz=3)"
    assert captured.err == f"error: {message}\n"
    with pytest.raises(SystemExit) as done, one_line_errors():
        raise CheckpointError("x does not fit")
    assert (done.value.code, capsys.readouterr().err) == (2, "error: x does not fit\n")


def test_ctrl_c_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done, one_line_errors("interrupted; run it again"):
        raise KeyboardInterrupt
    assert (done.value.code, capsys.readouterr().err) == (INTERRUPTED, "interrupted; run it again\n")


def test_a_command_without_gin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--gin.Train.steps=3: no flag --gin.Train.steps; use one of '--help'"):
        parse_flags(["--gin.Train.steps=3"], FLAGS, gin=False)
    with pytest.raises(ConfigError, match=r"^--gin_file=a: no flag --gin_file"):
        parse_flags(["--gin_file=a"], FLAGS, gin=False)
    with pytest.raises(SystemExit):
        parse_flags(["-h"], FLAGS, "python -m mmjax.export", gin=False)
    assert "gin" not in capsys.readouterr().out


@pytest.mark.parametrize("status", [0, 2])
def test_a_commands_status(status: int) -> None:
    with pytest.raises(SystemExit) as done:
        run_command(lambda: status)
    assert done.value.code == status


def test_a_reader_that_leaves_early() -> None:
    script = f"{sys.executable} -m mmjax.train --help | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("usage: python -m mmjax.train") and done.stderr == ""


def test_warnings_are_plain_lines() -> None:
    """absl, which comes with Orbax, puts a handler on the root logger that writes level and module before a line."""
    lines = (
        "import logging; from absl import logging as absl; absl.use_absl_handler()",
        "from mmjax.config.flags import run_command",
        "run_command(lambda: logging.getLogger('mmjax.train.trainer').warning('a damaged checkpoint') or 0)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "a damaged checkpoint\n")


def test_ctrl_c_ends_a_command_that_is_importing_at_once() -> None:
    """The exception that it raises otherwise is often lost in JAX's imports."""
    program = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "from mmjax.flags import importing, one_line_errors\n"
        "with one_line_errors():\n"
        "    with importing(): pass\n"
        "    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "    with importing():\n"
        "        try: os.kill(os.getpid(), signal.SIGINT)\n"
        "        except KeyboardInterrupt: pass\n"
        "print('still here')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, ""), done.stderr


def test_ctrl_c_that_a_callback_loses_is_sent_again() -> None:
    program = (
        "import gc, os, signal, time\n"
        "from mmjax.flags import one_line_errors\n"
        "def lose(phase, info):\n"
        "    if phase == 'start':\n"
        "        gc.callbacks.clear()\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "with one_line_errors():\n"
        "    gc.callbacks.append(lose)\n"
        "    gc.collect()\n"
        "    time.sleep(20)\n"
        "print('still here')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "interrupted\n")
