"""Initial values of the modules of a run: new values, the parameters of another run or of an export, or a checkpoint
that has other modules frozen.

A folder is checked by its metadata alone, before any device is used.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax

from mmjax.assembly.model import build_model
from mmjax.checkpoint import (
    FRESH,
    PARAMETERS,
    Checkpointer,
    CheckpointError,
    LeafInfo,
    Metadata,
    SavedParameters,
    find_parameters,
)
from mmjax.checkpoint.leaves import same_kind
from mmjax.config import differences, operative_config
from mmjax.configurable import ConfigError, require
from mmjax.data.loader import tokenizer_of
from mmjax.mesh.layout import Layout
from mmjax.mesh.processes import broadcast_text, is_first
from mmjax.models.config import LLM
from mmjax.models.graph import MultimodalModel
from mmjax.pipeline.place import PlacedModel
from mmjax.pipeline.state_shapes import module_of_moment
from mmjax.recipe import Recipe
from mmjax.recipe.pretrained import folder_parameters, pretrained_folders
from mmjax.train.files import RunFiles
from mmjax.weights.parameters import FolderParameters

_SETTING = re.compile(r"(\w+)/(\w+)\.\w+")
_SECONDS = 5.0
"""Seconds between two lines about the reading of a folder."""
_WITHOUT_SHAPE = ("Callbacks", "Layout", "Offload", "Optimizer", "Packing", "Source", "Weights")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Modules that start from the parameters in one folder.

    Attributes:
      saved: the folder's parameters.
      modules: names of the modules: parts of the model, such as "vision_projector".
      converted: by module whose parameters change dtype, the change in words.
    """

    saved: SavedParameters | FolderParameters
    modules: tuple[str, ...]
    converted: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """One line: the modules, the origin of their parameters, and changes of dtype."""
        line = f"{', '.join(self.modules)}: parameters of {self.saved.describe()}"
        return "; ".join([line, *(f"{module}: {change}" for module, change in self.converted.items())])


@dataclass(frozen=True, kw_only=True)
class Starts:
    """The origins of the parameters of all modules of a run.

    Attributes:
      loaded: the modules that start from saved parameters, one entry for each folder.
      fresh: names of the modules with new values.
    """

    loaded: tuple[Start, ...] = ()
    fresh: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """A line about the origin of each module's parameters; () where all have new values."""
        fresh = (f"{', '.join(self.fresh)}: new values",) if self.fresh else ()
        return (*(start.describe() for start in self.loaded), *fresh) if self.loaded else ()

    def elsewhere(self, modules: Collection[str], placed: PlacedModel) -> dict[str, LeafInfo]:
        """The entries of some modules' given parameters, for a checkpoint that refers to their files.

        They are by leaf, such as "params/llm/embed"; without leaves of no known checksum, and tables with new rows. The
        first process reads all tensors of these modules that are in folders of safetensors, for their checksums.
        """
        result, avals = {}, _parameter_avals(placed)
        for start in self.loaded:
            if isinstance(start.saved, SavedParameters):
                known = [name for name, leaf in start.saved.leaves.items() if leaf.crc32 is not None]
                entries = {name: start.saved.elsewhere(name) for name in known if _module(name) in start.modules}
            else:
                fresh = start.saved.folder.fresh  # rows that are in no folder
                known = [n for n, (key, _) in start.saved.places.items() if _module(n) in modules and key not in fresh]
                entries = {name: _in_folder(start.saved, name, avals[name]) for name in known}
            result |= {f"{PARAMETERS}{name}": leaf for name, leaf in entries.items() if _module(name) in modules}
        return result

    def read(self, placed: PlacedModel, say: Callable[[str], None] = lambda line: None) -> dict[str, jax.Array]:
        """The given parameters as checkpoint leaves, by name such as "params/llm/embed"; all processes call it.

        They are whole arrays, of which each process has the shards of its own devices.

        Those of a run, a checkpoint or an export are as they are stored; see ``StageState.from_logical``.

        Args:
          placed: the model.
          say: called every few seconds with a line about how much of a folder has been read.

        Raises:
          CheckpointError: a folder is damaged.
        """
        wanted = _parameter_avals(placed)
        result: dict[str, jax.Array] = {}
        for start in self.loaded:
            targets = {name: aval for name, aval in wanted.items() if _module(name) in start.modules}
            leaves = start.saved.read(targets, _ReadProgress(start, say))
            result |= {f"{PARAMETERS}{name}": leaf for name, leaf in leaves.items()}
        return result


def _parameter_avals(placed: PlacedModel) -> dict[str, jax.ShapeDtypeStruct]:
    """Avals of all parameters by name, such as "llm/embed"."""
    avals = {n: aval for stage in placed.stages.values() for n, aval in stage.state.logical_avals().items()}
    return {n.removeprefix(PARAMETERS): aval for n, aval in avals.items() if n.startswith(PARAMETERS)}


def _in_folder(saved: FolderParameters, name: str, aval: jax.ShapeDtypeStruct) -> LeafInfo:
    """The entry of a parameter that is read from a folder of safetensors; only the first process has its checksum."""
    key, view = saved.places[name]
    crc32 = saved.checksum(name, aval.shape, aval.dtype) if is_first() else None
    place = str(Path(saved.folder.path).absolute())
    return LeafInfo(shape=aval.shape, dtype=str(aval.dtype), crc32=crc32, folder=place, name=key, view=view)


class _ReadProgress:
    """Reports how much of a folder has been read, at most every few seconds."""

    def __init__(self, start: Start, say: Callable[[str], None]):
        self._name, self._say, self._began = ", ".join(start.modules), say, time.monotonic()
        self._next = self._began + _SECONDS

    def __call__(self, done: int, total: int) -> None:
        if (now := time.monotonic()) < self._next or not done:
            return
        self._next = now + _SECONDS
        speed = done / (now - self._began)
        remaining = f", {(total - done) / speed:.0f} s to go" if done < total else ""
        self._say(f"{self._name}: read {done / 1e9:.1f} of {total / 1e9:.1f} GB, {speed / 1e9:.2f} GB/s{remaining}")


def require_seed(recipe: Recipe, stored: Metadata, run_dir: Path) -> None:
    """Requires that a checkpoint's run has the seed of this one: its data follow from it.

    Args:
      recipe: this run's.
      stored: the checkpoint's metadata, as ``Checkpointer.latest_metadata()`` gives it.
      run_dir: the run directory, for the message.

    Raises:
      ConfigError: it is of a run with another seed.
    """
    seed, fix = stored.seed, f"the run in {run_dir} has seed"
    fix += f" {seed}, and with it its data; set it to {seed} or name another --run_dir"
    require(seed == recipe.train.seed, "Train.seed", recipe.train.seed, fix)


def run_begins(
    files: RunFiles | None,
    checkpointer: Checkpointer,
    *,
    from_scratch: bool,
    say: Callable[[str], None] = lambda line: None,
) -> bool:
    """Whether a run begins anew in its directory instead of going on from a checkpoint; all processes have to call it.

    It is False where there are checkpoints. A run that was killed before its first checkpoint was whole begins again;
    one that has lost its checkpoints does not.

    Args:
      files: the directory's files, `RunFiles(run_dir, print)` in process 0; else `None`.
      checkpointer: the directory's checkpoints, `Checkpointer(run_dir / "checkpoints")`.
      from_scratch: whether a run whose checkpoints are gone begins again.
      say: called with a line where steps without a checkpoint are trained again.

    Raises:
      ConfigError: the directory has steps and has lost its checkpoints, or has no journal that says that it had none,
        and `from_scratch` is not set; or `from_scratch` is set, and there are checkpoints to go on from.
    """
    facts = (str(files.run_dir), files.last_step, checkpointer.is_empty(), files.journal.is_empty()) if files else None
    run_dir, last, empty, never = json.loads(broadcast_text(json.dumps(facts)))
    if last and empty and never and not from_scratch:
        say(f"{run_dir} has steps up to {last}, but no checkpoint was whole before the run ended: it begins again")
    elif last and empty and not from_scratch:
        raise ConfigError(
            f"--run_dir={run_dir!r}: metrics.jsonl has steps up to {last}, but {checkpointer.directory} has no "
            "checkpoint to go on from; name another directory, or add --from_scratch to begin again"
        )
    if from_scratch and not empty:
        raise ConfigError(
            f"--from_scratch: {checkpointer.directory} has checkpoints; leave the flag out to go on from the last, "
            "or name another --run_dir"
        )
    return empty


def moments_since(recipe: Recipe, restored: Metadata, updates: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """Finds the age of each module's moments in a continued run.

    Args:
      recipe: says which modules are trained now.
      restored: the checkpoint's metadata, as ``Checkpointer.latest_metadata()`` gives it.
      updates: how many updates the run has done.

    Returns:
      By trained module, how many updates the run had done when the module's moments were zeros, where that is not 0;
      and a line about moments that are new or dropped and parameters that are held in another dtype, if there are any.
      Such as ({"vision": 100}, ("from step 100 on, vision (frozen before): new moments",)), or ({}, ()).
    """
    with_moments, before = {module_of_moment(name) for name in restored.leaves}, restored.extra.get("moments_since", {})
    trained = [module for module, optimizer in recipe.model.optimizers.items() if not optimizer.frozen]
    since = {module: before.get(module, 0) if module in with_moments else updates for module in trained}
    changes = "; ".join(_changes(recipe, with_moments, restored))
    line = (f"from step {restored.step} on, {changes}",) if changes else ()
    return {module: first for module, first in since.items() if first}, line


def _changes(recipe: Recipe, with_moments: Collection[str], restored: Metadata) -> Iterator[str]:
    """Yields the changes of modules since the checkpoint: newly trained, newly frozen, or in another dtype.

    Args:
      recipe: the configuration that continues the run.
      with_moments: modules that have moments in the checkpoint.
      restored: the checkpoint's metadata.
    """
    leaves = restored.leaves.items()
    stored = {name.removeprefix(PARAMETERS): leaf.dtype for name, leaf in leaves if name.startswith(PARAMETERS)}
    converted = _conversions(recipe, recipe.model.optimizers, stored)
    groups: dict[str, list[str]] = {" (frozen before): new moments": [], " (frozen now): moments dropped": []}
    new, gone = groups
    for module, optimizer in recipe.model.optimizers.items():
        why = "" if optimizer.frozen != (module in with_moments) else gone if optimizer.frozen else new
        if module in converted:
            why += f"{', ' if why else ': '}{converted[module]}"
        groups.setdefault(why, []).append(module)
    yield from (f"{', '.join(modules)}{why}" for why, modules in groups.items() if why and modules)


def frozen_elsewhere(recipe: Recipe, restored: Metadata) -> dict[str, LeafInfo]:
    """The leaves in a run's checkpoint that refer to another folder's bytes, of the modules that are frozen now.

    They are by name, such as "params/llm/embed"; {} where all bytes are the run's.

    Args:
      recipe: says which modules are frozen now.
      restored: the checkpoint's metadata, as ``Checkpointer.latest_metadata()`` gives it.
    """
    frozen = recipe.model.frozen
    away = {name: leaf for name, leaf in restored.leaves.items() if leaf.folder}
    return {name: leaf for name, leaf in away.items() if _module(name.removeprefix(PARAMETERS)) in frozen}


def find_starts(recipe: Recipe) -> Starts:
    """Finds the origin of each module's parameters in a new run. Reads no leaf, and uses no device.

    `Starts.loaded` has a `Start` for each folder with saved parameters, first folders of safetensors, then runs:
    `saved` says where each leaf is, `modules` are the names of those that start from it, such as ("vision", "llm"), and
    `converted` has a text for each module that changes dtype. `Starts.fresh` are the names of modules with new values.

    recipe: the configuration, as `load_config(["run.gin"])` gives it.

    Raises:
      ConfigError: a folder is neither a run, a checkpoint nor an export, or does not fit; one line that names module,
        leaf and fix.
    """
    folders = {module: folder for module in recipe.model.optimizers if (folder := recipe.init_from(module))}
    pretrained = pretrained_folders(recipe)
    fresh = tuple(
        module for module in recipe.model.optimizers if not folders.get(module) and not recipe.model.folder(module)
    )
    if not folders and not pretrained:
        return Starts(fresh=fresh)
    wanted = shapes_of_model(build_model(recipe, tokenizer_of(recipe.data.settings, recipe.model.media)))
    starts = [_start(recipe, folder_parameters(recipe, path, wanted), modules) for path, modules in pretrained.items()]
    for folder in dict.fromkeys(folders.values()):
        modules = tuple(module for module, origin in folders.items() if origin == folder)
        try:
            saved = find_parameters([folder])[folder]
        except CheckpointError as error:
            raise ConfigError(f"{_field(recipe, modules[0])}={folder!r}: {error}") from None
        for module in modules:
            _require_fit(recipe, module, {n: s for n, s in wanted.items() if _module(n) == module}, saved)
        starts.append(_start(recipe, saved, modules))
    return Starts(loaded=tuple(starts), fresh=fresh)


def _start(recipe: Recipe, saved: SavedParameters | FolderParameters, modules: tuple[str, ...]) -> Start:
    return Start(saved=saved, modules=modules, converted=_conversions(recipe, modules, saved.dtypes))


def _conversions(recipe: Recipe, modules: Iterable[str], dtypes: Mapping[str, str]) -> dict[str, str]:
    """The change, in words, of parameters that are stored in another dtype than the run holds them in, by module.

    Args:
      recipe: has the dtype that each module is held in.
      modules: the modules that take stored parameters.
      dtypes: the dtype of each stored parameter, by name such as "llm/embed".
    """
    stored: dict[str, dict[str, None]] = {}
    for name, dtype in dtypes.items():
        stored.setdefault(_module(name), {})[dtype] = None
    result = {}
    for module in (module for module in modules if module in stored):
        target = recipe.model.optimizers[module].held_in(recipe.train.dtype)
        if different := [dtype for dtype in stored[module] if dtype != target]:
            how = "widened" if target == "float32" and "float64" not in different else "rounded"
            result[module] = f"{', '.join(different)} {how} to {target}"
    return result


def shapes_of_model(model: MultimodalModel) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters by leaf name: {"llm/embed": (512, 64), …}; they are the same under any layout.

    model: the module graph, as `build_model(recipe, tokenizer)` makes it.
    """
    stages = model.stages(dict.fromkeys(model.nodes, Layout()))
    leaves = [leaf for stage in stages for part in stage.slices for leaf in jax.tree.leaves(part.leaves())]
    return {name: leaf.logical_shape for leaf in leaves for name in leaf.names}


def _require_fit(recipe: Recipe, module: str, wanted: Mapping[str, tuple[int, ...]], saved: SavedParameters) -> None:
    setting, new = f"{_field(recipe, module)}={saved.folder!r}", f"{module}/Weights.init_from={FRESH!r} for new values"
    if module not in saved.modules:
        has = ", ".join(saved.modules) or "nothing"
        raise ConfigError(f"{setting}: it has {has} and no module {module!r}; name another folder, or set {new}")
    stored = {name: leaf for name, leaf in saved.leaves.items() if _module(name) == module}
    dtype = recipe.model.optimizers[module].held_in(recipe.train.dtype)
    problem = next(_problems(module, wanted, stored, dtype), "")
    if not problem:
        return
    settings = [
        f"{name} = {stored_value} there, {configured} here"
        for name, stored_value, configured in _settings(recipe, module, saved)
    ]
    fix = f"make equal what is {'; '.join(settings[:3])}" if settings else f"configure {module} as it is there"
    raise ConfigError(f"{setting}: {problem}; {fix}; or set {new}")


def _problems(
    module: str, wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, LeafInfo], dtype: str
) -> Iterator[str]:
    layers = [len({name.split("/")[2] for name in names if "/layers/" in name}) for names in (stored, wanted)]
    missing, unknown = [n for n in wanted if n not in stored], [n for n in stored if n not in wanted]
    if layers[0] != layers[1]:
        leaf = (missing or unknown)[0]
        yield f"{module} has {layers[0]} layers there and {layers[1]} here, so {leaf} is on one side alone"
    for names, where in ((missing, "here and not there"), (unknown, "there and not here")):
        if names:
            further = f"and {len(names) - 1} more leaves of {module} are" if names[1:] else f"of {module} is"
            yield f"{names[0]} {further} {where}"
    for name, shape in wanted.items():
        leaf = stored[name]
        if leaf.shape != shape or not same_kind(leaf.dtype, dtype):
            yield f"{name} of {module} is {leaf.dtype}{list(leaf.shape)} there and {dtype}{list(shape)} here"


def _settings(recipe: Recipe, module: str, saved: SavedParameters) -> Iterator[tuple[str, str, str]]:
    """Settings that differ and may explain different shapes of `module`: name, value in the folder, value here."""
    # A projector's shapes follow from its own settings and from those of the two modules that it connects.
    part, node = recipe.model.parts[module], recipe.model.node_of(module)
    modules = {module, node.name, *([LLM] if part is node.projector else [])}
    for name, (stored_value, configured) in differences(saved.metadata.config, operative_config(recipe)).items():
        match = _SETTING.fullmatch(name)
        without = _WITHOUT_SHAPE if part is node.lora else (*_WITHOUT_SHAPE, "Lora")
        if match and match[1] in modules and match[2] not in without:
            yield name, stored_value, configured


def _module(leaf: str) -> str:
    return leaf.partition("/")[0]


def _field(recipe: Recipe, module: str) -> str:
    """The setting that names the folder of `module`."""
    weights = recipe.model.parts[module].weights
    return f"{module}/Weights.init_from" if weights.init_from else "Checkpoint.init_from"
