"""Ctrl-C and SIGTERM as a request: when it is heard, and that it never cuts a step in two."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

from mmjax.train.interrupt import Stopped, StopRequest


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_first_is_a_request(capfd: pytest.CaptureFixture[str]) -> None:
    reached = []
    with pytest.raises(Stopped), StopRequest() as stop:
        stop.check()
        ctrl_c()
        reached.append(stop.wanted)
        stop.check()
        reached.append("never")
    assert reached == [True]
    assert "Ctrl-C again stops without saving" in capfd.readouterr().err


def test_second_raises_where_it_arrives() -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest():
        ctrl_c()
        ctrl_c()


def test_sigterm_is_a_request_however_often_it_comes(capfd: pytest.CaptureFixture[str]) -> None:
    """Clusters repeat it. Ctrl-C after it is somebody who does not want to wait."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            stop.check()
        ctrl_c()
    assert capfd.readouterr().err == "\nSIGTERM: stopping after this step\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_after_ctrl_c_changes_nothing() -> None:
    with StopRequest() as stop:
        ctrl_c()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            stop.check()


def test_heard_while_waiting() -> None:
    """The future goes on; whoever waits for it does not."""
    with ThreadPoolExecutor(1) as pool, StopRequest() as stop:
        assert stop.result(pool.submit(lambda: 7)) == 7
        release = threading.Event()
        waiting = pool.submit(release.wait)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(Stopped):
            stop.result(waiting)
        release.set()
        assert waiting.result()
        with pytest.raises(Stopped):
            stop.result(waiting)  # it is there, but somebody asked to stop


def test_an_error_of_what_is_waited_for() -> None:
    with ThreadPoolExecutor(1) as pool, StopRequest() as stop, pytest.raises(ZeroDivisionError):
        stop.result(pool.submit(lambda: 1 / 0))


def test_raises_nothing_in_somebody_elses_code() -> None:
    """Where an exception would be swallowed, and the request with it."""
    with StopRequest() as stop:
        with contextlib.suppress(Exception):
            ctrl_c()
            time.sleep(0.01)
        with pytest.raises(Stopped):
            stop.check()


def test_of_several_processes_all_stop_or_none() -> None:
    """Another one was asked: that is heard with an answer, and not before. Asked itself, it does not go alone."""
    answers = [0.0, 0.0, 4.0]
    with StopRequest(lambda wanted: jnp.array([wanted + answers.pop(0)])) as stop:
        stop.check_together()
        asked = stop.ask()
        answer = stop.ask()
        stop.hear(asked)
        stop.check()
        stop.hear(answer)
        with pytest.raises(Stopped):
            stop.check()
    asked_itself = [0.0, 0.0]
    with StopRequest(lambda wanted: jnp.array([wanted + asked_itself.pop()])) as stop:
        before = stop.ask()
        ctrl_c()
        stop.hear(before)
        stop.check()
        with pytest.raises(Stopped):
            stop.check_together()


def test_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_other_threads_leave_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def enter() -> None:
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.wanted))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
