"""The language of masks: rules that say which kinds of tokens see which other kinds. NumPy alone.

A mask is one line of rules, or the name of one of ``PRESETS``:

    text sees all before; vision sees vision in item

A rule has the form "query kinds see key kinds relation". Kinds of tokens are joined by commas or "and": ``all``,
``text``, ``media`` (all tokens but text), ``prefix`` (the tokens of a sample before the first one with a loss),
``suffix`` (the tokens from there on), and the name of every module whose media have places in the text. The relation of
key to query is one of

* ``before``: the key is earlier in order; windows and chunks of a layer limit it further;
* ``everywhere``: the key is anywhere in the query's sample;
* ``in item``: the key is in the same image, recording or drawing, whatever the window.

A token sees every token that some rule allows, and always itself, but never a token of another sample.

Each rule is a bit of two 32-bit words that every token has. ``is`` has the bits of the rules whose keys include the
token; ``attends`` has the bits of the rules whose queries include it. So every mask takes two numbers a token, and a
mask has at most 32 rules. For more rules, words would become several numbers; only ``Mask`` tests bits.

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

Relation = Literal["before", "everywhere", "in item"]
"""The relation of a key to a query."""
RELATIONS: tuple[Relation, ...] = get_args(Relation)
ITEMS: Literal["in item"] = "in item"
MaskKind = Literal["causal", "full", "words"]
"""The inputs of a mask: order and segments, segments alone, or the words of rule bits besides."""
WORDS = ("is", "attends", "items")
"""The host inputs of each token that masks of kind "words" read."""
KINDS = ("all", "text", "media", "prefix", "suffix")
"""The kinds of tokens of every model, besides the names of its modules."""
PRESETS: Mapping[str, str] = {
    "causal": "all sees all before",
    "full": "all sees all everywhere",
    "cornstarch": "text sees all before; media sees media in item",
    "gemma3": "all sees all before; media sees media in item",
    "paligemma": "prefix sees prefix everywhere; suffix sees all before",
    "qwen-omni": "all sees all before",
}
"""Masks by name. Cornstarch's EP, EE and MP (§6.5) are one mask, with media before the text, inside it, or packed with
other samples. Qwen-Omni's text model is causal; its media differ in positions alone."""
MAX_RULES = 32
"""The maximal number of rules, one bit each."""
_EXAMPLE = PRESETS["cornstarch"]
_RULE = re.compile(r"(?P<queries>.+?) sees? (?P<keys>.+) (?P<relation>before|everywhere|in item)")
_GENERATED_KINDS = ("all", "text", "suffix")
"""The kinds of a generated token."""


@dataclass(frozen=True)
class Rule:
    """One rule: tokens of ``query_kinds`` see tokens of ``key_kinds`` in the given relation."""

    query_kinds: tuple[str, ...]
    key_kinds: tuple[str, ...]
    relation: Relation

    def __str__(self) -> str:
        return f"{' and '.join(self.query_kinds)} sees {' and '.join(self.key_kinds)} {self.relation}"


@dataclass(frozen=True)
class Rules:
    """The rules of a mask; rule i is bit i of the words."""

    rules: tuple[Rule, ...]

    @classmethod
    def parse(cls, text: str, field: str = "mask") -> Rules:
        """Parses a line of rules or the name of a preset.

        Args:
          text: the line, such as "text sees all before; vision sees vision in item", or a key of ``PRESETS``.
          field: the setting's name in errors.

        Raises:
          ConfigError: the line is wrong; the message has a suggestion or an example.
        """
        if text.strip() and " " not in text.strip() and text not in PRESETS:
            named = near_misses(text, PRESETS)
            fix = f"did you mean {named[0]!r}?" if named else f"use one of {', '.join(PRESETS)}, or rules"
            raise ConfigError(f"{field}={text!r}: {fix}; rules are written {_EXAMPLE!r}")
        parts = [part.strip() for part in PRESETS.get(text, text).split(";")]
        rules = tuple(_rule(part, text, field) for part in parts if part)
        require(len(rules) > 0, field, text, f"has no rule; write 'causal', or rules such as {_EXAMPLE!r}")
        require(
            len(rules) <= MAX_RULES, field, text, f"has {len(rules)} rules; a mask has {MAX_RULES} at most, one a bit"
        )
        return cls(rules)

    def require_kinds(self, modules: Iterable[str], field: str, text: str) -> None:
        """Raises `ConfigError` unless every kind in the rules is one of ``KINDS`` or a module with media.

        Args:
          modules: names of the modules with media.
          field, text: the setting's name and value, for errors.

        Raises:
          ConfigError: a kind is unknown; the message has similar names.
        """
        known = (*KINDS, *modules)
        for kind in (kind for rule in self.rules for kind in (*rule.query_kinds, *rule.key_kinds)):
            if kind not in known:
                raise ConfigError(f"{field}={text!r}: no tokens are {kind!r}; {suggest(kind, known)}")

    @property
    def kind(self) -> MaskKind:
        """The kind of a mask with these rules: "causal" for "all sees all before", "full" for "all sees all
        everywhere", else "words".
        """
        plain: dict[Relation, MaskKind] = {"before": "causal", "everywhere": "full"}
        everyone = ("all",)
        if len(self.rules) == 1 and self.rules[0].query_kinds == self.rules[0].key_kinds == everyone:
            return plain.get(self.rules[0].relation, "words")
        return "words"

    @property
    def relations(self) -> tuple[Relation, ...]:
        """The relation of each rule, such as ("before", "in item"); () for kinds other than "words"."""
        return tuple(rule.relation for rule in self.rules) if self.kind == "words" else ()

    @property
    def shows_intervals(self) -> bool:
        """Whether each token sees one interval of its sample's tokens, whatever the data, if the tokens of each medium
        are neighbours.

        False may be too careful. A union of intervals that contain the token is one.
        """
        return all(_shows_interval(rule) for rule in self.rules)

    def words(
        self, kinds: Mapping[str, Bool[np.ndarray, " N"]], items_N: Int[np.ndarray, " N"]
    ) -> tuple[UInt32[np.ndarray, " N"], UInt32[np.ndarray, " N"]]:
        """The words ``is`` and ``attends`` of tokens, in this order.

        Args:
          kinds: by kind, whether each token is of that kind; with every kind that the rules name.
          items_N: the number of each token's medium in its sample, from 1; 0 for text.
        """
        is_N, attends_N = np.zeros(len(items_N), np.uint32), np.zeros(len(items_N), np.uint32)
        for bit, rule in enumerate(self.rules):
            is_query_N = np.logical_or.reduce([kinds[kind] for kind in rule.query_kinds])
            is_key_N = np.logical_or.reduce([kinds[kind] for kind in rule.key_kinds])
            if rule.relation == ITEMS:
                is_key_N = is_key_N & (items_N > 0)
            is_N |= is_key_N.astype(np.uint32) << np.uint32(bit)
            attends_N |= is_query_N.astype(np.uint32) << np.uint32(bit)
        return is_N, attends_N

    @cached_property
    def generated(self) -> dict[str, int]:
        """The words of a generated token: {"is": bits, "attends": bits}."""
        words = {"is": 0, "attends": 0}
        for bit, rule in enumerate(self.rules):
            if rule.relation != ITEMS and set(rule.key_kinds) & set(_GENERATED_KINDS):
                words["is"] |= 1 << bit
            if set(rule.query_kinds) & set(_GENERATED_KINDS):
                words["attends"] |= 1 << bit
        return words

    @property
    def shows_later(self) -> Rule | None:
        """The first rule by which tokens see later generated text, else ``None``: with such a rule text cannot be
        generated.
        """
        for rule in self.rules:
            if rule.relation == "everywhere" and set(rule.key_kinds) & set(_GENERATED_KINDS):
                return rule
        return None


def _shows_interval(rule: Rule) -> bool:
    """Whether a rule shows a token either one interval that contains it, or no tokens."""
    keys = {*rule.key_kinds}
    if rule.relation == ITEMS:
        return keys.isdisjoint(("text", "prefix", "suffix"))  # a medium as a whole
    if "all" in keys or {"text", "media"} <= keys or {"prefix", "suffix"} <= keys:
        return True
    return rule.query_kinds == rule.key_kinds and len(keys) == 1 and keys <= {"prefix", "suffix"}


def _rule(part: str, text: str, field: str) -> Rule:
    """Parses one rule, a part of the line ``text``."""
    match = _RULE.fullmatch(" ".join(part.replace(",", " and ").split()))
    if match:
        query_kinds, key_kinds = (_kinds(match[group], part, text, field) for group in ("queries", "keys"))
        return Rule(query_kinds, key_kinds, cast(Relation, match["relation"]))
    words = part.split()
    verbs = [word for word in words if word in ("see", "sees")]
    if not verbs:
        near = next((word for word in words if near_misses(word, ("see", "sees"))), "")
        fix = f"{part!r} does not say who sees whom" + (f", did you mean 'sees' by {near!r}?" if near else "")
    elif len(words) < 4:
        fix = f"{part!r} is incomplete: write who sees whom, and one of {', '.join(RELATIONS)}"
    else:
        fix = f"{part!r} ends in {words[-1]!r}; {suggest(' '.join(words[-1:]), RELATIONS)}"
    raise ConfigError(f"{field}={text!r}: {fix}; rules are written {_EXAMPLE!r}")


def _kinds(joined: str, part: str, text: str, field: str) -> tuple[str, ...]:
    kinds = tuple(kind for kind in joined.split(" and ") if kind != "and")
    for kind in kinds:
        if not kind.isidentifier():
            fix = f"{kind!r} in {part!r} is no kind of token; join kinds by 'and', and rules by ';'"
            raise ConfigError(f"{field}={text!r}: {fix}")
    return kinds
