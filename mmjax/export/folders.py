"""Exports of folders of safetensors, as `save_pretrained` writes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mmjax.config import load_run_config
from mmjax.configurable import ConfigError
from mmjax.export.checkpoints import Read, chosen_step, read_leaves, read_merged, require_out
from mmjax.flags import importing
from mmjax.models.config import LLM, lora_name
from mmjax.models.lora.merging import require_adapters
from mmjax.recipe import Recipe
from mmjax.recipe.exportable import compose_run, without_images
from mmjax.weights.folder import PIPELINE
from mmjax.weights.pipelines import SCHEDULER, SCHEDULER_FILE, Pipeline

if TYPE_CHECKING:  # see `importing`
    import numpy as np

    from mmjax.checkpoint import SavedParameters


@dataclass(frozen=True)
class ExportedFolders:
    """Finished folders of safetensors.

    Attributes:
      step: the checkpoint's step.
      tensors: by folder, the modules whose parameters are in it, and how many tensors these are.
      without: modules that no folder can hold.
      apart: why the modules are not in one folder of a whole model; "" where they are.
      images: why a new folder of a whole model has no rules for images; "" where it has.
    """

    step: int
    tensors: Mapping[str, tuple[tuple[str, ...], int]]
    without: tuple[str, ...]
    apart: str = ""
    images: str = ""


def export_folders(
    run_dir: str | Path, out: str | Path, step: int = 0, *, allow_code: bool = False, merge_lora: bool | None = False
) -> ExportedFolders:
    """Writes folders of safetensors, as ``save_pretrained`` does, from checkpoint `step` (0: the newest) of `run_dir`.

    A module that started from such a folder gives a copy of it with the run's parameters: tensors keep their keys,
    dtypes and files, and tensors that mmjax does not hold are copied. Encoders of latents, which are frozen, are left
    out. If all modules started from one folder, the copy
    is `out`. If they did not and LLaVA has such a model, `out` is a new folder of a LLaVA; else each folder's copy is
    `out`/<first module>, and a language model that started from none gives a new folder. A generator that started from
    a pipeline of ``diffusers`` gives one with its denoiser, the scheduler by its settings, and the autoencoder.
    No more than one tensor, or one file of the folder, is in memory.

    Args:
      run_dir: the run's directory.
      out: the directory to make, which must not exist.
      step: the checkpoint's; 0 for the newest.
      allow_code: whether the run's settings may name code of one's own, which is run.
      merge_lora: whether low-rank adapters are added to the weights that they adapt, and are left out otherwise; `None`
        merges where the run has any.

    Raises:
      ConfigError: there is no such run, checkpoint or folder; `out` exists; no module can be written; or there are no
        adapters to merge.
      CheckpointError: the checkpoint cannot be read.
    """
    require_out(out, step)
    recipe = load_run_config(run_dir, allow_code=allow_code)
    with importing():
        from mmjax.checkpoint import Checkpointer, SavedParameters
        from mmjax.recipe.composed_folder import grown_files, image_token, write_whole
        from mmjax.recipe.pretrained import folder_parameters, pretrained_folders
        from mmjax.weights.write import rewrite
    checkpointer = Checkpointer(Path(run_dir) / "checkpoints")
    step = chosen_step(checkpointer, run_dir, step)
    saved = SavedParameters.find(str(checkpointer.directory / f"{step:08d}"), means=True)
    merge_lora = bool(recipe.model.adapted) if merge_lora is None else merge_lora
    adapters = [lora_name(name) for name in recipe.model.adapted] if merge_lora else []
    require_adapters(adapters, merge=merge_lora)
    read = partial(read_merged, saved) if merge_lora else partial(read_leaves, saved)
    shapes = {name: leaf.shape for name, leaf in saved.leaves.items() if name.partition("/")[0] not in adapters}
    # Encoders of latents are parts of folders that do not change.
    unwritten = {*map(lora_name, recipe.model), *recipe.model.latent_encoders}
    sources = {path: names for path, names in pretrained_folders(recipe).items() if not set(names) & unwritten}
    composed, apart = compose_run(recipe, saved.leaves[f"{LLM}/embed"].shape[0], image_token(recipe))
    if composed:
        tensors = write_whole(recipe, composed, read, Path(out))
        without = tuple(name for name in saved.modules if name not in (*adapters, *composed.modules))
        return ExportedFolders(step, {str(out): (composed.modules, tensors)}, without, images=without_images(recipe))
    written = {}
    for path, modules in sources.items():
        target = Path(out) if len(sources) == 1 else Path(out) / modules[0]
        original = folder_parameters(recipe, path, shapes)
        files = grown_files(recipe, original.folder.config) if LLM in modules else {}
        pipeline = recipe.model.parts[modules[0]].weights.pipeline
        place = target / pipeline.denoiser if pipeline else target
        tensors = rewrite(original.folder, original.places, read, place, copies=original.copies, files=files)
        if pipeline:
            _write_pipeline(recipe, pipeline, modules[0], target)
        written[str(place)] = modules, tensors
    copied = [name for names in sources.values() for name in names]
    adapters += recipe.model.latent_encoders
    without = tuple(name for name in saved.modules if name not in (*adapters, *copied))
    if LLM in without and not sources:
        written[str(out)] = (LLM,), _write_new(recipe, saved, read, Path(out))
        without = tuple(name for name in without if name != LLM)
    if not written:
        raise ConfigError(f"--format=safetensors: no module of {run_dir} has such a folder; use --format=orbax")
    return ExportedFolders(step, written, without, apart)


def _write_pipeline(recipe: Recipe, pipeline: Pipeline, part: str, out: Path) -> None:
    """Writes the rest of a pipeline beside its denoiser: scheduler, autoencoder and index.

    Text encoders and tokenizers, in whose place the denoiser has learned to read the run's LLM, are left out.
    """
    from mmjax.models.scheduler_files import changed_scheduler

    scheduler = changed_scheduler(pipeline.scheduler(), recipe.model.node_of(part).settings)
    (out / SCHEDULER).mkdir()
    (out / SCHEDULER / SCHEDULER_FILE).write_text(json.dumps(scheduler, indent=2) + "\n")
    if folder := pipeline.autoencoder_folder:
        shutil.copytree(folder, out / Path(folder).name)
    shutil.copyfile(Path(pipeline.path) / PIPELINE, out / PIPELINE)


def _write_new(recipe: Recipe, saved: SavedParameters, stored: Read, out: Path) -> int:
    """Writes a folder for a language model that started from none, as its family does; returns how many tensors."""
    from mmjax.models.pretrained import family_weights
    from mmjax.weights.table import expand
    from mmjax.weights.write import write

    family = recipe.model.llm.family
    weights = family_weights(family)
    settings = replace(recipe.model.llm.settings, vocab=saved.leaves[f"{LLM}/embed"].shape[0])
    hf_config = weights.to_hf_config(settings)

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        return {name.removeprefix(f"{LLM}/"): leaf for name, leaf in stored([f"{LLM}/{n}" for n in names]).items()}

    return write(hf_config, expand(weights.rows(settings, hf_config["model_type"]), settings.layers), read, out)
