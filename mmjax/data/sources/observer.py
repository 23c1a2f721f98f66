"""`IndexObserver`: receives the progress of making an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class IndexObserver(Protocol):
    """An object that receives the progress of making an index."""

    def progress(self, total: int, description: str) -> AbstractContextManager[Callable[[int], None]]:
        """A context; its value is a function that is called with the number of records done."""
        ...

    def message(self, text: str) -> None:
        """Receives a line."""
        ...


class Silent:
    """An `IndexObserver` that ignores everything."""

    @contextmanager
    def progress(self, total: int, description: str) -> Iterator[Callable[[int], None]]:
        """A context whose value is a function that does nothing."""
        yield lambda _: None

    def message(self, text: str) -> None:
        """Does nothing."""
