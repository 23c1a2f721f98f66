"""Ctrl-C as a request: when it is heard, and that it never cuts a step in two."""

from __future__ import annotations

import signal
import threading

import pytest

from mmjax.run.interrupt import Stopped, StopRequest


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


def test_at_once() -> None:
    with StopRequest() as stop:
        with pytest.raises(Stopped), stop.at_once():
            ctrl_c()
            pytest.fail("the request was not heard at once")
        with pytest.raises(Stopped), stop.at_once():
            pytest.fail("entered although a stop was wanted")


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
