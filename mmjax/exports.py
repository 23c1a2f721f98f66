"""Imports the public names of a package on first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def exported(package: str, names_of: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """Makes the ``__getattr__`` of ``package``, which imports names on first use.

    Args:
      package: full name of the package, which is ``__name__`` in its ``__init__.py``.
      names_of: public names by the full name of the module that defines them: {"mmjax.mesh.layout": ["Layout"]}.

    Returns:
      A function from a name to its value. It raises AttributeError, with a hint, for other names.
    """
    module_of = {name: module for module, names in names_of.items() for name in names}

    def find(name: str) -> object:
        if name in module_of:
            value = getattr(importlib.import_module(module_of[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        from mmjax.configurable import suggest

        raise AttributeError(f"module {package!r} has no attribute {name!r}; {suggest(name, module_of)}")

    return find
