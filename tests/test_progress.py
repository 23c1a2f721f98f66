"""Progress: what a log gets, what a terminal gets, and the time left."""

from __future__ import annotations

import io
import time

import pytest

from mmjax.progress import Progress, announced, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(style: str, stream: io.StringIO, total: int = 25, start: int = 0, log_every: int = 10) -> str:
    clock = iter(float(second) for second in range(1000))
    with Progress(
        total, "training", start=start, style=style, stream=stream, log_every=log_every, clock=lambda: next(clock)
    ) as progress:
        for step in range(start + 1, total + 1):
            progress.update(step, loss=2.0 / step, tokens_per_s=1234.5 * step, mfu=None)
            if step == 12:
                progress.message("checkpoint [12] saved")
    return stream.getvalue()


def test_a_log_gets_a_line_every_few_steps_and_the_last():
    assert run("auto", io.StringIO()).splitlines() == [
        "training 10/25  loss 0.2  tokens/s 12.3k  15s left",
        "checkpoint [12] saved",
        "training 20/25  loss 0.1  tokens/s 24.7k  5s left",
        "training 25/25  loss 0.08  tokens/s 30.9k  took 25s",
    ]


def test_a_resumed_run_counts_on_from_its_step():
    assert run("lines", io.StringIO(), total=1030, start=1000).splitlines() == [
        "training 1010/1030  loss 0.00198  tokens/s 1.2M  20s left",
        "training 1020/1030  loss 0.001961  tokens/s 1.3M  10s left",
        "training 1030/1030  loss 0.001942  tokens/s 1.3M  took 30s",
    ]


def test_a_terminal_gets_one_bar_with_step_loss_rate_and_time_left(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    text = run("auto", Terminal())
    assert "checkpoint [12] saved" in text
    last = text.splitlines()[-1] if text.splitlines()[-1].strip("\x1b[?25lh") else text.splitlines()[-2]
    for part in ("training", "25/25", "loss 0.08", "tokens/s 30.9k", "took 25s"):
        assert part in last


def test_a_narrow_terminal_drops_whole_values_and_never_the_step_or_the_time(monkeypatch):
    monkeypatch.setenv("COLUMNS", "52")
    monkeypatch.setenv("TERM", "xterm")
    text = run("auto", Terminal())
    assert "25/25" in text and "loss 0.08" in text and "took 25s" in text and "…" not in text
    assert "tokens" not in text


def test_silent_prints_nothing():
    assert run("silent", Terminal()) == ""


def test_counting_programs():
    stream = io.StringIO()
    with Progress(12, "compiling programs", stream=stream, log_every=6, clock=lambda: 3.0) as progress:
        for _ in range(12):
            progress.advance()
    assert stream.getvalue().splitlines() == [
        "compiling programs 6/12  0s left",
        "compiling programs 12/12  took 0s",
    ]


def test_slow_work_is_announced_and_quick_work_is_not(capsys):
    with announced("quick", seconds=60):
        pass
    began = time.monotonic()
    with announced("tracing", seconds=0.01):
        while not (said := capsys.readouterr().out) and time.monotonic() - began < 30:
            time.sleep(0.005)
    assert said == "tracing\n"


def test_an_unknown_style_is_refused():
    with pytest.raises(ValueError, match="style 'loud'"):
        Progress(1, style="loud")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (7500, "2h05m")])
def test_duration(seconds, text):
    assert duration(seconds) == text
