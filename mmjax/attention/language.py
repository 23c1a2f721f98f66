"""A language for masks: which kinds of tokens see which others, and how. NumPy alone.

A mask is one line of rules, or the name of one of ``PRESETS``:

    text sees all before; vision sees vision in item

A rule says who sees whom and how. *Who* and *whom* are kinds of tokens, joined by commas or "and": ``all``, ``text``,
``media`` (all that is no text), ``prefix`` (what comes before the first token of a sample that is learned), ``suffix``
(the rest), and every module whose media have places in the text, by its name. *How* is one of

* ``before``: those that are before it in order, which windows and chunks of a layer narrow further;
* ``everywhere``: those anywhere in its sample;
* ``in item``: those of its own image, recording or drawing, whatever the window.

A token sees what any rule lets it see, and always itself; never one of another sample.

A rule is a bit. A token's word ``is`` has the bits of the rules by which it is seen, its word ``attends`` those of the
rules by which it sees. So it takes two numbers of 32 bits a token, whatever the mask, and a mask has 32 rules at most.
For more, words would become rows of numbers: ``Mask`` tests bits in one place.

Shapes: N tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast, get_args

import numpy as np
from jaxtyping import Bool, Int, UInt32

from mmjax.configurable import ConfigError, near_misses, require, suggest

How = Literal["before", "everywhere", "in item"]
"""How a token sees another: where they are to each other."""
HOWS: tuple[How, ...] = get_args(How)
ITEMS: Literal["in item"] = "in item"
MaskKind = Literal["causal", "full", "words"]
"""What a mask reads: order and segments, segments alone, or words of bits besides."""
WORDS = ("is", "attends", "items")
"""The host inputs of each token that the data side makes for masks of words."""
KINDS = ("all", "text", "media", "prefix", "suffix")
"""Kinds of tokens of any model; its modules' names are kinds too."""
PRESETS: Mapping[str, str] = {
    "causal": "all sees all before",
    "full": "all sees all everywhere",
    "cornstarch": "text sees all before; media sees media in item",
    "gemma3": "all sees all before; media sees media in item",
    "paligemma": "prefix sees prefix everywhere; suffix sees all before",
    "qwen-omni": "all sees all before",
}
"""Masks by name. Cornstarch's EP, EE and MP (§6.5) are one rule over media that come first, stand in the text, or are
packed with other samples. Qwen-Omni's text model is causal; its media differ in positions alone."""
MOST = 32
"""The most rules, one a bit."""
_EXAMPLE = PRESETS["cornstarch"]
_RULE = re.compile(r"(?P<who>.+?) sees? (?P<whom>.+) (?P<how>before|everywhere|in item)")
_GENERATED = ("all", "text", "suffix")
"""The kinds of a token of text that is generated."""


@dataclass(frozen=True)
class Rule:
    """One rule: tokens of the kinds ``who`` see those of the kinds ``whom``."""

    who: tuple[str, ...]
    whom: tuple[str, ...]
    how: How

    def __str__(self) -> str:
        return f"{' and '.join(self.who)} sees {' and '.join(self.whom)} {self.how}"


@dataclass(frozen=True)
class Rules:
    """The rules of a mask; rule i is bit i of the words."""

    rules: tuple[Rule, ...]

    @classmethod
    def parse(cls, text: str, field: str = "mask") -> Rules:
        """The rules of one line.

        Args:
          text: see above.
          field: the setting's name in errors.

        Raises:
          ConfigError: the line is not of this language; the message says what is meant, or what may be written.
        """
        if text.strip() and " " not in text.strip() and text not in PRESETS:
            named = near_misses(text, PRESETS)
            fix = f"did you mean {named[0]!r}?" if named else f"use one of {', '.join(PRESETS)}, or rules"
            raise ConfigError(f"{field}={text!r}: {fix}; rules are written {_EXAMPLE!r}")
        parts = [part.strip() for part in PRESETS.get(text, text).split(";")]
        rules = tuple(_rule(part, text, field) for part in parts if part)
        require(len(rules) > 0, field, text, f"has no rule; write 'causal', or rules such as {_EXAMPLE!r}")
        require(len(rules) <= MOST, field, text, f"has {len(rules)} rules; a mask has {MOST} at most, one a bit")
        return cls(rules)

    def require_kinds(self, modules: Iterable[str], field: str, text: str) -> None:
        """Requires that every kind that is no general one is a module with media.

        Raises:
          ConfigError: one is not; the message has near names.
        """
        known = (*KINDS, *modules)
        for kind in (kind for rule in self.rules for kind in (*rule.who, *rule.whom)):
            if kind not in known:
                raise ConfigError(f"{field}={text!r}: no tokens are {kind!r}; {suggest(kind, known)}")

    @property
    def kind(self) -> MaskKind:
        """What a mask of these rules reads; the two plain ones need no words."""
        plain: dict[How, MaskKind] = {"before": "causal", "everywhere": "full"}
        everyone = ("all",)
        if len(self.rules) == 1 and self.rules[0].who == self.rules[0].whom == everyone:
            return plain.get(self.rules[0].how, "words")
        return "words"

    @property
    def hows(self) -> tuple[How, ...]:
        """How each bit is seen; () where there are no words."""
        return tuple(rule.how for rule in self.rules) if self.kind == "words" else ()

    def words(
        self, kinds: Mapping[str, Bool[np.ndarray, " N"]], items_N: Int[np.ndarray, " N"]
    ) -> tuple[UInt32[np.ndarray, " N"], UInt32[np.ndarray, " N"]]:
        """``is`` and ``attends`` of tokens.

        Args:
          kinds: which tokens are of each kind.
          items_N: the number of each token's medium in its sample, from 1; 0 for text, which is in no item.
        """
        is_N, attends_N = np.zeros(len(items_N), np.uint32), np.zeros(len(items_N), np.uint32)
        for bit, rule in enumerate(self.rules):
            whom_N = np.logical_or.reduce([kinds[kind] for kind in rule.whom])
            if rule.how == ITEMS:
                whom_N = whom_N & (items_N > 0)
            is_N |= whom_N.astype(np.uint32) << np.uint32(bit)
            attends_N |= np.logical_or.reduce([kinds[kind] for kind in rule.who]).astype(np.uint32) << np.uint32(bit)
        return is_N, attends_N

    @cached_property
    def generated(self) -> dict[str, int]:
        """The words of a token of text that is generated, by input."""
        found = {"is": 0, "attends": 0}
        for bit, rule in enumerate(self.rules):
            if rule.how != ITEMS and set(rule.whom) & set(_GENERATED):
                found["is"] |= 1 << bit
            if set(rule.who) & set(_GENERATED):
                found["attends"] |= 1 << bit
        return found

    @property
    def shows_later(self) -> Rule | None:
        """A rule by which tokens see text that is generated after them, if there is one: such a mask writes no text."""
        found = (rule for rule in self.rules if rule.how == "everywhere" and set(rule.whom) & set(_GENERATED))
        return next(found, None)


def _rule(part: str, text: str, field: str) -> Rule:
    found = _RULE.fullmatch(" ".join(part.replace(",", " and ").split()))
    if found:
        return Rule(_kinds(found["who"], part, text, field), _kinds(found["whom"], part, text, field), _how(found))
    words = part.split()
    verbs = [word for word in words if word in ("see", "sees")]
    if not verbs:
        near = next((word for word in words if near_misses(word, ("see", "sees"))), "")
        fix = f"{part!r} says not who sees whom" + (f", did you mean 'sees' by {near!r}?" if near else "")
    elif len(words) < 4:
        fix = f"{part!r} is not whole: who sees whom, and one of {', '.join(HOWS)}"
    else:
        fix = f"{part!r} ends in {words[-1]!r}; {suggest(' '.join(words[-1:]), HOWS)}"
    raise ConfigError(f"{field}={text!r}: {fix}; rules are written {_EXAMPLE!r}")


def _how(found: re.Match[str]) -> How:
    return cast(How, found["how"])


def _kinds(named: str, part: str, text: str, field: str) -> tuple[str, ...]:
    kinds = tuple(kind for kind in named.split(" and ") if kind != "and")
    for kind in kinds:
        if not kind.isidentifier():
            fix = f"{kind!r} in {part!r} is no kind of token; join kinds by 'and', and rules by ';'"
            raise ConfigError(f"{field}={text!r}: {fix}")
    return kinds
