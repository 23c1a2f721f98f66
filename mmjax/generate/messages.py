"""Prompts from messages, and the configuration with which a run's model answers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from mmjax.assembly.latents import usual_pixels, usual_size
from mmjax.assembly.model import encoder_specs
from mmjax.assembly.samples import open_source
from mmjax.configurable import require
from mmjax.data.config import PackingConfig
from mmjax.data.picture_prompts import MOST_SIDE
from mmjax.data.source import Source
from mmjax.data.sources.config import PROMPTS, SourceConfig
from mmjax.data.sources.target_pictures import with_reference_size
from mmjax.data.types import BLANK, EncoderSpec, Sample
from mmjax.eval.folder import source_like
from mmjax.mesh.layout import cell_count
from mmjax.models.config import LLM
from mmjax.pipeline.config import OffloadConfig
from mmjax.recipe import Recipe
from mmjax.recipe.positions import positions_of

_BUCKET = 64
"""Tokens: rows of messages and their answers have a multiple of it, so that few shapes are compiled."""
_ROWS = 8
"""The most messages of a cell that are answered side by side."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Messages that a run's model can answer.

    Attributes:
      recipe: the run's configuration, with messages as its data and nothing trained.
      source: the messages.
      room: tokens of a row, for prompt and answer.
      limit: the most tokens of an answer.
      specs: specs of the model's encoders and generators, by name.
    """

    recipe: Recipe
    source: Source
    room: int
    limit: int
    specs: Mapping[str, EncoderSpec]

    def samples(self) -> list[Sample]:
        """The messages as samples that end where the answer begins."""
        assert isinstance(self.source, Sized)
        return [self.source.sample(index) for index in range(len(self.source))]

    def require_positions(self, samples: Sequence[Sample]) -> None:
        """Raises ConfigError unless the model has positions for the prompt of every sample and `limit` more tokens."""
        most = positions_of(self.recipe)
        for number, sample in enumerate(samples, 1):
            fix = f"prompt {number} has {sample.prompt} tokens, and the model has positions for {most} tokens"
            most_new = max(1, most - sample.prompt)
            legal = not most or sample.prompt + self.limit <= most
            require(legal, "--max_tokens", self.limit, f"{fix}; use {most_new}, or a shorter prompt")


def for_pictures(recipe: Recipe, path: str, *, media: str, cache: str, source: str = "") -> Prompts:
    """Reads dialogues that end with pictures to be made, which keep their sizes.

    The arguments and errors are those of `for_messages`; `path` is a file of dialogues with blank pictures.
    """
    blank = {name: replace(node.latents, path=BLANK) for name, node in recipe.model.nodes.items() if node.latents.path}
    paths = [recipe.model[name].latents.path for name in blank]
    model = recipe.model.map(lambda node: replace(node, latents=blank.get(node.name, node.latents)))
    like = source_like(recipe, source, "--messages")
    recipe = replace(recipe, model=model)
    changes = {"kind": "llava", "draw": False, "drawn_size": (0, 0), "drawn_pixels": MOST_SIDE**2}
    changes |= _of_latents(paths[0]) if paths else _of_references(like) if like else {}
    return _prompts(recipe, path, changes, media=media, cache=cache, limit=0, source=source)


def _of_references(like: SourceConfig) -> dict[str, Any]:
    """The sizes, as settings of a source, of the pictures that those of the source ``like`` are made from."""
    rule = with_reference_size(like)
    return {"reference_size": rule.drawn_size, "reference_pixels": 0 if any(rule.drawn_size) else rule.drawn_pixels}


def _of_latents(path: str) -> dict[str, Any]:
    """The same where their latents were made ahead, in the folder ``path``."""
    return {"reference_size": usual_size(path) or (0, 0), "reference_pixels": usual_pixels(path)}


def for_messages(recipe: Recipe, path: str, *, media: str, cache: str, limit: int, source: str = "") -> Prompts:
    """Reads messages with the template and preprocessing of the run.

    Args:
      recipe: the run's configuration, as `load_run_config(run_dir)` gives it.
      path: a JSONL file of dialogues, as `write_messages` writes it.
      media: the folder that names of media start from, such as ".".
      cache: a directory for the messages' index.
      limit: the most tokens of an answer.
      source: the name in `Data.sources` whose template and preprocessing apply; "" where all have the same.

    Returns:
      The messages as a `source`, a `recipe` that reads them, and the tokens of a row, for `Writer`.

    Raises:
      ConfigError: a dialogue or a medium cannot be read.
    """
    return _prompts(recipe, path, {"kind": PROMPTS}, media=media, cache=cache, limit=limit, source=source)


def _prompts(
    recipe: Recipe,
    path: str,
    changes: Mapping[str, Any],
    *,
    media: str,
    cache: str,
    limit: int,
    source: str,
) -> Prompts:
    """See `for_messages`; ``changes`` are settings of the messages' source in place of those of the run's."""
    settings = recipe.data.settings
    like = source_like(recipe, source, "--messages") or SourceConfig(max_pixels=settings.max_pixels, max_patches=0)
    reader = replace(like, path=path, media=media, held_out=0, strict=True, cut=False, **changes)
    settings = replace(settings, sources={"messages": 1.0}, cache=cache, reorder="none", servers=(), workers=0)
    data = replace(recipe.data, settings=settings, sources={"messages": reader})
    frozen = {part: replace(optimizer, frozen=True) for part, optimizer in recipe.model.optimizers.items()}
    model = recipe.model.with_optimizers(frozen).map(lambda node: replace(node, offload=OffloadConfig()))
    recipe = replace(recipe, data=data, model=model)
    messages = open_source(recipe, split="test")
    assert isinstance(messages, Sized)
    count, longest, cells = len(messages), messages.worst_case().tokens, cell_count(recipe.model.layouts.values())
    # As many microbatches as fill the language model's pipeline, if there are so many rows.
    microbatches = max(1, min(recipe.model[LLM].layout.pp, -(-count // cells)))
    rows = cells * min(_ROWS, -(-count // (cells * microbatches)))
    train = replace(recipe.train, global_batch=rows * microbatches, microbatches=microbatches)
    data = data.with_settings(sequence_length=_rounded(longest))
    model = recipe.model.map(lambda node: replace(node, packing=PackingConfig(buckets=())))
    recipe = replace(recipe, data=data, model=model, train=train)
    specs = encoder_specs(recipe)
    return Prompts(recipe=recipe, source=messages, room=_rounded(longest + limit), limit=limit, specs=specs)


def _rounded(tokens: int) -> int:
    """``tokens``, rounded up to a bucket's width."""
    return -(-tokens // _BUCKET) * _BUCKET
