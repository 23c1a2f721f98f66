"""Names of a package that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def exported(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The ``__getattr__`` of ``package``, which imports names on first use; ``homes`` has the names of each module."""
    where = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name in where:
            value = getattr(importlib.import_module(where[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        from mmjax.configurable import suggest

        raise AttributeError(f"module {package!r} has no attribute {name!r}; {suggest(name, where)}")

    return find
