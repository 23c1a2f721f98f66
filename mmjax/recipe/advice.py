"""Lines for people about a legal configuration: its waste, and settings that change nothing. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator

from mmjax.mesh.layout import cell_count
from mmjax.models.config import LLM
from mmjax.recipe.exportable import export_advice
from mmjax.recipe.idle import idle_lines
from mmjax.recipe.positions import positions_of
from mmjax.recipe.ranks import show_ranks
from mmjax.recipe.recipe import Recipe
from mmjax.schedule.schedules import OFFLOADING


def advise(recipe: Recipe) -> tuple[str, ...]:
    """Lines about settings that were changed to fit a flag, that waste devices or rows, or that change nothing.

    And one where an export could not be one folder of a whole model. They are for people: "Train.global_batch=6: …". ()
    if there is no advice.
    """
    return (
        *recipe.fitted,
        *_rows(recipe),
        *_lanes_and_copies(recipe),
        *_adapters(recipe),
        *_text(recipe),
        *_devices(recipe),
        *export_advice(recipe),
        *idle_lines(recipe),
    )


def _rows(recipe: Recipe) -> Iterator[str]:
    """Rows of padding that every microbatch has."""
    train, cells = recipe.train, cell_count(recipe.model.layouts.values())
    rows = train.global_batch // train.microbatches
    if rows % cells:
        padded = -(-rows // cells) * cells
        yield (
            f"Train.global_batch={train.global_batch}: microbatches of {rows} rows are padded to {padded}, "
            f"a multiple of all modules' dp; {padded * train.microbatches} wastes none"
        )


def _lanes_and_copies(recipe: Recipe) -> Iterator[str]:
    """Lanes and stages that wait for others."""
    train = recipe.train
    for name, layout in recipe.model.layouts.items():
        if idle := -train.microbatches % layout.lanes:
            yield (
                f"{name}/Layout.lanes={layout.lanes}: {idle} lane(s) have a microbatch less than the others; "
                f"Train.microbatches={train.microbatches + idle} keeps all busy"
            )
        if layout.copies > 1 and train.schedule not in OFFLOADING:
            yield (
                f"{name}/Layout.copies={layout.copies}: under Train.schedule={train.schedule!r} all stages of "
                f"the {LLM} wait for each other at every op of {name}; {OFFLOADING[-1]!r} runs these one after another"
            )


def _adapters(recipe: Recipe) -> Iterator[str]:
    """Modules that are trained beside their adapters."""
    for name in recipe.model.adapted:
        rank = recipe.model[name].lora.settings.rank
        if not recipe.model[name].optimizer.frozen:
            yield f"{name}/Lora.rank={rank}: {name} is trained too; {name}/Optimizer.frozen=True trains adapters alone"


def _text(recipe: Recipe) -> Iterator[str]:
    """Positions and tokens that the LLM has not learned, and will not learn."""
    most, length = positions_of(recipe), recipe.data.settings.sequence_length
    if 0 < most < length:
        yield (
            f"Data.sequence_length={length}: {recipe.model.folder(LLM)} was made for {most} tokens "
            f"(max_position_embeddings); longer samples are trained at positions that it does not know"
        )
    if recipe.data.settings.new_tokens and recipe.model.optimizers[LLM].frozen:
        yield f"{LLM}/Optimizer.frozen=True: rows of Data.new_tokens={recipe.data.settings.new_tokens} are not trained"


def _devices(recipe: Recipe) -> Iterator[str]:
    """Devices without work."""
    used = {rank for layout in recipe.model.layouts.values() for rank in layout.ranks}
    idle = sorted(set(range(recipe.world.devices or recipe.devices)) - used)
    if idle:
        yield f"World.devices={recipe.world.devices}: no layout uses {show_ranks(idle)}"
