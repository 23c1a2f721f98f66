"""Exports of low-rank adapters, as PEFT writes them."""

from __future__ import annotations

from pathlib import Path

from mmjax.config import load_run_config
from mmjax.configurable import require
from mmjax.export.checkpoints import chosen_step, read_leaves, require_out
from mmjax.flags import importing
from mmjax.models.config import lora_name


def export_adapters(
    run_dir: str | Path, out: str | Path, step: int = 0, *, allow_code: bool = False
) -> list[tuple[str, str]]:
    """Writes folders of PEFT from checkpoint `step` (0: the newest) of `run_dir`: low-rank adapters alone, in fp32.

    One module's are `out`, those of several `out`/<module>; neither may exist. Weights have the names that a model of
    the folder has in which the module is. `allow_code`: whether settings may name code of one's own, which is run.

    Returns:
      Each folder's path and the name of its module, such as ("out/llm", "llm").

    Raises:
      ConfigError: there is no such run or checkpoint, or it has no adapters; `out` exists; or PEFT names no such
        adapters.
      CheckpointError: the checkpoint cannot be read.
    """
    require_out(out, step)
    recipe = load_run_config(run_dir, allow_code=allow_code)
    with importing():
        from mmjax.checkpoint import Checkpointer, SavedParameters
        from mmjax.models.lora.peft import adapter_config, adapter_rows
        from mmjax.recipe.pretrained import adapted_module
        from mmjax.weights.table import assemble, expand
        from mmjax.weights.write import write_adapters
    checkpointer = Checkpointer(Path(run_dir) / "checkpoints")
    saved = SavedParameters.find(
        str(checkpointer.directory / f"{chosen_step(checkpointer, run_dir, step):08d}"), means=True
    )
    names = recipe.model.adapted
    require(bool(names), "--format", "peft", "the run has no adapters; use another format")
    folders = []
    for name in names:
        module, prefix = adapted_module(recipe, name), f"{lora_name(name)}/"
        require(bool(module.rows), f"{name}/Lora.rank", module.lora.rank, "no folder of transformers has such a module")
        entries = expand(adapter_rows(module), module.layers)
        leaves = read_leaves(saved, [prefix + entry.leaf for entry in entries])
        tensors = assemble(entries, {leaf.removeprefix(prefix): value for leaf, value in leaves.items()})
        place = Path(out) / name if len(names) > 1 else Path(out)
        write_adapters(adapter_config(module, recipe.model.folder(name)), tensors, place)
        folders.append((str(place), name))
    return folders
