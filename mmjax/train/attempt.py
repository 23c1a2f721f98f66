"""Work that all processes of a run do in the same rounds, and that all of them give up if one fails.

A process that gives up alone leaves the others in a collective that never ends. So all meet before each round on the
devices and at the end, and a process that failed says so there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mmjax.data.sources.skipped import reason_of
from mmjax.mesh.processes import Agreement, ProcessTimeout
from mmjax.train.interrupt import Stopped

T = TypeVar("T")
_PATIENCE = 60.0
"""Seconds that a process which has failed waits for the others: they may be in a collective that it has left."""


class GivenUp(Exception):
    """The work failed in some process; all processes raise this with the same message, the reason."""


def attempt(work: Callable[[Callable[[], None]], T], check: Callable[[], None] = lambda: None) -> T:
    """The result of ``work(meet)``, which calls ``meet`` before each step that all processes have to do together.

    Args:
      work: takes the function ``meet``, of no arguments, and returns the result; does the same in all processes,
        unless it fails.
      check: called at each meeting, the last one after ``work`` included; may raise ``Stopped`` in all processes.

    Raises:
      GivenUp: some process failed.
      Exception: this process failed in the middle of a round, and the others do not come to the meeting.
    """

    def meet() -> None:
        if reason := Agreement()(""):
            raise GivenUp(reason)
        check()

    try:
        result = work(meet)
        meet()
        return result
    except (GivenUp, Stopped):
        raise
    except Exception as error:
        try:
            reason = Agreement()(reason_of(error), _PATIENCE)
        except ProcessTimeout:
            raise error from None
        raise GivenUp(reason) from error
