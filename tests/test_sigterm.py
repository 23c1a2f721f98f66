"""SIGTERM in real processes, and in this one: one line, one status, and an end within the time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from trial_runs import REPOSITORY

from mmjax import sigterm
from mmjax.sigterm import INTERRUPTED, Sigterm

# What a process does that gets SIGTERM three times as soon as it says so.
HEAD = """
import os, signal, sys, threading, time
from mmjax import sigterm
from mmjax.flags import importing, one_line_errors, run_plain
def main():
    with one_line_errors("interrupted; again"):
        body()
    return 0
def come():
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
def come_once_asleep():
    # Without thread switches the other thread first runs when the main thread lets go of the interpreter in its sleep.
    def come_behind(gate):
        gate.acquire()
        come()
    gate = threading.Lock()
    gate.acquire()
    sys.setswitchinterval(1000)
    threading.Thread(target=come_behind, args=[gate], daemon=True).start()
    gate.release()
"""
TAIL = "\nrun_plain(main)\n"


def ended(body: str, head: str = HEAD, tail: str = TAIL) -> tuple[int, str, float]:
    """Exit status of a process with this body, its lines on stderr, and its seconds."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", head + body + tail],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr, time.monotonic() - started


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def body():\n    come()\n    time.sleep(60)", "interrupted; again\n"),
        ("def body():\n    with importing():\n        come()\n        time.sleep(60)", "interrupted\n"),
        # The exception is dropped, as a library may do: the time limit holds all the same.
        (
            "def body():\n    sigterm.within(0.3)\n    try:\n        come()\n    except BaseException: pass\n"
            "    time.sleep(60)",
            "error: the process has not ended 0.3 s after SIGTERM (Checkpoint.grace_seconds): it ends without another "
            "checkpoint, and the newest whole one stays\n",
        ),
        # The main thread hears nothing, as in a library that does not return: no handler of Python's is called.
        (
            "def body():\n    sigterm.within(0.3)\n    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
            "    come_once_asleep()\n    time.sleep(60)",
            "error: the process has not ended 0.3 s after SIGTERM (Checkpoint.grace_seconds): it ends without another "
            "checkpoint, and the newest whole one stays\n",
        ),
    ],
    ids=["raises", "importing", "dropped", "stuck"],
)
def test_ends_in_one_line(body: str, said: str) -> None:
    status, lines, seconds = ended(body)
    assert (status, lines) == (INTERRUPTED, said) and seconds < 50


def test_a_command_that_is_starting_ends_in_one_line() -> None:
    """`python -m mmjax.…` before its command line is read; a library that imports mmjax keeps the default."""
    start = "import os, signal, sys, time\nsys.argv[0] = {argv!r}\nimport mmjax\nos.kill(os.getpid(), signal.SIGTERM)\n"
    assert ended("time.sleep(60)", start.format(argv="-m"), "")[:2] == (INTERRUPTED, "interrupted\n")
    assert ended("time.sleep(60)", start.format(argv="mine.py"), "")[:2] == (-signal.SIGTERM, "")


def test_a_forked_process_leaves_its_parent_alone() -> None:
    """A signal to it is not heard by its parent's thread, nor is it deaf itself."""
    body = """
def body():
    sigterm.within(0.2)
    child = os.fork()
    if not child:
        come()
        time.sleep(60)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    time.sleep(0.5)
    print(status, file=sys.stderr)
"""
    assert ended(body)[:2] == (0, f"interrupted\n{INTERRUPTED}\n")


def test_contexts_nest_and_are_left_as_they_were_entered() -> None:
    heard: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with Sigterm(lambda: heard.append("outer")):
        with Sigterm(lambda: heard.append("inner")):
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
        with Sigterm(lambda: heard.append("next")):  # whoever comes later hears of it too
            pass
    assert heard == ["inner", "next"]
    with Sigterm(lambda: heard.append("again")):
        pass
    with Sigterm(lambda: None), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
        with Sigterm(sigterm.raise_interrupt):
            pytest.fail("it raises when it is entered")
    assert not sigterm._state.contexts
    assert heard == ["inner", "next"] and signal.getsignal(signal.SIGTERM) is before


def test_the_limit_ends_with_the_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that goes on after a run was stopped is not ended later, and a handler of its own stays."""
    monkeypatch.setattr(sigterm._state, "grace", 0.2)
    with Sigterm(lambda: None):
        signal.raise_signal(signal.SIGTERM)
    time.sleep(0.5)
    with Sigterm(lambda: None):
        time.sleep(0.3)
    mine: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: mine.append(number))
    try:
        with Sigterm(lambda: pytest.fail("it has a handler")):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert mine == [signal.SIGTERM]
