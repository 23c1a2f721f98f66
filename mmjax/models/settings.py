"""Bases of the settings of families: defaults, derived sizes, and checks that families share. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from mmjax.attention.settings import check_backend_layout, check_backend_run
from mmjax.configurable import require, setting_name
from mmjax.mesh.layout import Layout, ModuleSizes
from mmjax.models.choices import Medium


class ModuleSettings:
    """Settings of a module.

    A family's settings are a dataclass that inherits from this class. They override attributes by fields of their own,
    and methods by checks of their own.

    Attributes:
      medium: the medium that it encodes or generates; ``None`` for a language model.
      divided_by_tp: names of the sizes that tp divides; a size of 0 is none.
      divided_by_expert_tp: names of the sizes that tp divides unless its ranks have whole experts; 0 is none.
      replicable: those of them that tp may be a multiple of instead: several ranks then have the same part.
      layers, width: depth and model width.
      heads: query heads; 0 without attention.
      mlp: hidden units; 0 without an mlp.
      experts: experts of a layer; 0 without.
      attention: the attention backend; "" lets mmjax choose.
      remat: the checkpoint policy, one of ``REMATS``.
    """

    medium: ClassVar[Medium | None] = None
    divided_by_tp: ClassVar[tuple[str, ...]] = ("heads", "mlp", "width")
    divided_by_expert_tp: ClassVar[tuple[str, ...]] = ()
    replicable: ClassVar[tuple[str, ...]] = ()

    layers: int
    width: int
    heads: int = 0
    mlp: int = 0
    experts: int = 0
    attention: str = ""
    remat: str = "none"

    def sizes(self, name: str) -> ModuleSizes:
        """The sizes that a layout of the module ``name`` divides."""
        by_tp, by_expert_tp = (
            {setting_name(name, self, field): size for field in fields if (size := getattr(self, field))}
            for fields in (self.divided_by_tp, self.divided_by_expert_tp)
        )
        return ModuleSizes(
            layers=self.layers,
            heads=self.heads,
            experts=self.experts,
            by_tp=by_tp,
            by_expert_tp=by_expert_tp,
            replicable=[setting_name(name, self, field) for field in self.replicable if getattr(self, field)],
        )

    def check(self, name: str, layout: Layout) -> None:
        """Requires that the module ``name`` can be computed under the layout, which divides its ``sizes``.

        Raises:
          ConfigError: it cannot; one line that names the setting, its value and a legal one.
        """
        field = setting_name(name, self, "attention")
        check_backend_layout(field, self.attention, f"{name}/Layout", cp=layout.cp, cp_way=layout.cp_way)

    def check_run(self, name: str, dtype: str, platform: str) -> None:
        """Requires that the module ``name`` can be computed in a run.

        Args:
          name: the module's name.
          dtype: the value of ``Train.dtype``.
          platform: the value of ``World.platform``.

        Raises:
          ConfigError: it cannot.
        """
        check_backend_run(setting_name(name, self, "attention"), self.attention, dtype, platform)

    def check_media(self, name: str, media: Sequence[str]) -> None:
        """Raises ``ConfigError`` if settings of the module ``name`` name other media than those of ``media``.

        ``media`` are names of the modules that give the LLM's rows tokens. By default no setting names any.
        """

    def check_codes(self, name: str, *, example: str) -> None:
        """Raises ``ConfigError`` if the module ``name``, a generator without a medium, cannot speak codes.

        ``example`` is a number of codes for the message, and whose it is.
        """

    @property
    def needs_order(self) -> bool:
        """Whether ``Layout.cp_tokens`` has to be "contiguous" with ranks of cp."""
        return False

    @property
    def needs_whole_rows(self) -> bool:
        """Whether ``Layout.cp`` has to be 1."""
        return False

    @property
    def needs_all_tokens(self) -> bool:
        """Whether ``Layout.sp`` has to be False with ranks of tp."""
        return False

    @property
    def uncut_setting(self) -> str:
        """The field that keeps layers in one stage, such as "kv_shared_layers"; "" where layers may be cut anywhere."""
        return ""

    @property
    def grid_setting(self) -> str:
        """The field that counts rows and columns of an image's tokens, such as "rope_sections"; "" where none does."""
        return ""


class EqualHeads(ModuleSettings):
    """Settings of layers whose heads divide the width equally."""

    norm_eps: float = 1e-6
    """The epsilon of norms; a settings class may override it by a field."""
    bias: bool = True
    """Whether products have biases; a settings class may override it by a field."""
    qkv_bias: bool = True
    """Whether queries, keys and values have biases; a settings class may override it by a field."""
    k_bias: bool = True
    """Whether keys have one beside queries and values; a settings class may override it by a field."""
    qk_norm: bool = False
    """Whether queries and keys of each head are normed; a settings class may override it by a field."""
    v_norm: bool = False
    """Whether values of each head are normed; a settings class may override it by a field."""
    score_width: float = 0.0
    """The number whose root divides scores, 0 for a head's width; a settings class may override it by a field."""
    clipped: bool = False
    """Whether products bound their inputs and results; a settings class may override it by a field."""
    post_norms: bool = False
    """Whether branches end with norms of their own; a settings class may override it by a field."""

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads: one for each query head."""
        return self.heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def value_width(self) -> int:
        """Width of one head of values."""
        return self.head_width


class ConditionTokens(ModuleSettings):
    """Settings of a generator whose condition may have places of its own in a row, before those of patches."""

    splits_queries: ClassVar[bool] = False
    """Whether ranks of context parallelism may have equal parts of such places, and of those of patches."""
    shares_queries: ClassVar[bool] = False
    """Whether ranks of sequence parallelism may share such places; they share those of patches then too."""
    queries: int = 0
    """The number of such places; a settings class may override it by a field."""

    @property
    def needs_whole_rows(self) -> bool:
        """See ``ModuleSettings``."""
        return self.queries > 0 and not self.splits_queries

    @property
    def needs_all_tokens(self) -> bool:
        """See ``ModuleSettings``."""
        return self.queries > 0 and not self.shares_queries

    def check(self, name: str, layout: Layout) -> None:
        """See ``ModuleSettings``; rows of a condition and patches are not cut, or in equal parts of both."""
        super().check(name, layout)
        field = setting_name(name, self, "queries")
        fix = f"a row is a condition ({field}={self.queries}) and a picture, and is not cut; set it to 1"
        require(not self.needs_whole_rows or layout.cp == 1, f"{name}/Layout.cp", layout.cp, fix)
        if layout.cp > 1:
            ranks = layout.cp * (layout.tp if layout.shares_tokens and self.shares_queries else 1)
            fix = f"ranks of {name}/Layout.cp={layout.cp} have equal parts of its places; use a multiple of {ranks}"
            require(self.queries % ranks == 0, field, self.queries, fix)
        if self.shares_queries and layout.shares_tokens:
            fix = f"{name}/Layout.tp={layout.tp} ranks share its places; use a multiple, or set Layout.sp to False"
            require(self.queries % layout.tp == 0, field, self.queries, fix)
            return
        fix = f"a row is a condition ({field}={self.queries}) and a picture, and is not cut; set it to False"
        require(not (self.queries and layout.shares_tokens), f"{name}/Layout.sp", layout.sp, fix)


class OnCanvases:
    """Settings of a module whose rows are canvases, with a picture in the upper left corner of each."""

    canvases: tuple[tuple[int, int], ...]

    def canvas(self, places: int) -> tuple[int, int]:
        """Rows and columns of the canvas of so many places.

        Raises:
          ValueError: there is no such canvas.
        """
        for rows, columns in self.canvases:
            if rows * columns == places:
                return rows, columns
        raise ValueError(f"a row of {places} places is none of the canvases {self.canvases}")

    def check_canvases(self, field: str) -> None:
        """Raises ``ConfigError`` unless there are canvases, each of which holds the one before.

        ``field`` is the setting, such as "UNet.canvases".
        """
        require(bool(self.canvases), field, self.canvases, "has none; give rows and columns, ((64, 64),)")
        for sides in self.canvases:
            fix = "must be pairs of rows and columns, such as ((64, 64),)"
            require(len(sides) == 2 and min(sides) > 0, field, self.canvases, fix)
        for before, after in pairwise(self.canvases):
            fix = f"must hold the canvas before: {after} is no larger than {before}; sort them, or leave one out"
            holds = before != after and before[0] <= after[0] and before[1] <= after[1]
            require(holds, field, self.canvases, fix)


class SquarePatches:
    """Settings of a module that cuts images into square patches."""

    patch: int
    channels: int

    @property
    def patch_values(self) -> int:
        """The number of values in one patch: ``patch``² · ``channels``."""
        return self.patch * self.patch * self.channels
