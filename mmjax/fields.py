"""Fields of configurable dataclasses: their types, defaults, examples and documentation."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_EXAMPLES: Mapping[type, object] = {int: 1, float: 0.5, bool: True, str: "text"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """One field of a configurable.

    Attributes:
      name: the field's name.
      annotation: its type as an object, such as `int` or `tuple[str, ...]`, not as text.
      default: its default, or a value that its default factory has made; `dataclasses.MISSING` if it has neither.
      example: a legal value for messages: `metadata["example"]`, else the default, else one made from the type.
      doc: the sentence that the class's docstring has for it; "" if it has none.
    """

    name: str
    annotation: Any
    default: object
    example: object
    doc: str


@lru_cache(maxsize=64)
def fields_of(cls: type[Any]) -> Mapping[str, FieldInfo]:
    """The fields of the configurable dataclass `cls` by name, in their order, as a read-only mapping.

    An entry has name, annotation, default, example and doc.
    """
    hints, docs = typing.get_type_hints(cls), _field_docs(cls)
    infos = {}
    for field in dataclasses.fields(cls):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        annotation = hints[field.name]
        legal = field.metadata.get("example", example(annotation) if default in ((), {}, "") else default)
        infos[field.name] = FieldInfo(
            name=field.name, annotation=annotation, default=default, example=legal, doc=docs.get(field.name, "")
        )
    return types.MappingProxyType(infos)


def example(annotation: Any) -> object:
    """A value that a resolved annotation allows: 1 for `int`, ("text",) for `tuple[str, ...]`.

    A resolved annotation is a type and not its text.

    The first type of a union counts. It is `None` for classes other than int, float, bool and str.
    """
    if annotation in _EXAMPLES:
        return _EXAMPLES[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return example(args[0])
    if origin is tuple:
        return (example(args[0]),) if args[-1] is Ellipsis else tuple(example(item) for item in args)
    if origin is not None and issubclass(origin, Mapping):
        return {example(args[0]): example(args[1])}
    return None


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """Sentences by field of the docstrings of the class and of the dataclasses from which it inherits fields:
    "name: sentence" or "name, name: sentence for both".
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base) and dataclasses.fields(base):
            docs |= _docs_of(base)
    return docs


def _docs_of(cls: type[Any]) -> dict[str, str]:
    """See ``_field_docs``; of the class's own docstring."""
    names = "|".join(re.escape(field.name) for field in dataclasses.fields(cls))
    text = re.sub(r"\n\s*\n|\n\s*(Attributes|Raises|Source):", " \0", cls.__doc__ or "")
    # After a sentence or at the start of a line: in "how activations cross between devices: ..." it is a mere word.
    head = rf"(?:^|[\n\0]|(?<=[.;])\s)\s*((?:{names})(?:, (?:{names}))*):\s"
    pieces = re.split(head, text)
    docs: dict[str, str] = {}
    for group, body in zip(pieces[1::2], pieces[2::2], strict=True):
        sentence = " ".join(body.split("\0")[0].split()).replace("``", "")
        for name in group.split(", "):
            docs[name] = sentence
    return docs
