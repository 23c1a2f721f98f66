"""`python -m mmjax.export --run_dir=D --out=PATH [--step=N] [--best] [--format=safetensors] [--merge_lora]`: the
parameters of a checkpoint alone.

`from orbax.checkpoint import v1 as ocp; ocp.load("/absolute/PATH")` gives nested dicts by the parameters' logical
names: `{"llm": {"embed": [V, D], "layers": {"000": ...}, ...}, "vision": ...}`. What is printed last is a command for
it. A new run starts from PATH with `--gin.Checkpoint.init_from=PATH`.

`--format=safetensors` writes what `transformers` loads: the folder that the run's modules started from, with the run's
parameters, in the folder's dtypes. A run of modules from several folders gives a LLaVA, where that has such modules,
else a folder for each, PATH/<module>; a language model of new values becomes a folder too. The status is 1 where a
module is in none of them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mmjax.config import Config, load_run_config
from mmjax.config.exportable import compose_run
from mmjax.config.flags import Flag, one_line_errors, parse_flags, run_command
from mmjax.configurable import ConfigError, one_of, require
from mmjax.flags import ALLOW_CODE, importing
from mmjax.models.config import LLM, lora_name
from mmjax.models.lora.merging import merged_adapters, require_adapters

if TYPE_CHECKING:  # see `importing`
    import jax
    import numpy as np

    from mmjax.checkpoint import Checkpointer, SavedParameters

FLAGS = (
    Flag(name="run_dir", doc="the directory of a training run.", required=True),
    Flag(name="out", doc="the directory to make; it must not exist.", required=True),
    Flag(name="step", doc="which checkpoint; 0 takes the newest.", default=0),
    Flag(name="best", doc="takes the checkpoint that is best by the run's Checkpoint.best.", default=False),
    Flag(
        name="format",
        doc="orbax, safetensors for folders that transformers loads, or peft for low-rank adapters alone.",
        default="orbax",
    ),
    Flag(name="merge_lora", doc="whether low-rank adapters are added to the weights that they adapt.", default=False),
    ALLOW_CODE,
)
Read = Callable[[Collection[str]], Mapping[str, "np.ndarray"]]
"""Leaves by name, in the host's memory."""
FORMATS = ("orbax", "safetensors", "peft")
PREFIX = "params/"


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Attributes:
      step: the checkpoint's step.
      leaves: how many leaves were written.
      parameters: the elements of all leaves.
    """

    step: int
    leaves: int
    parameters: int


@dataclass(frozen=True)
class ExportedFolders:
    """Finished folders of safetensors.

    Attributes:
      step: the checkpoint's step.
      tensors: by folder, the modules whose parameters are in it, and how many tensors these are.
      without: modules that no folder can hold.
      apart: why there is no one folder of a whole model; "" where there is.
    """

    step: int
    tensors: Mapping[str, tuple[tuple[str, ...], int]]
    without: tuple[str, ...]
    apart: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the parameters of one checkpoint; returns the exit status."""
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, "python -m mmjax.export", gin=False)
        run_dir, out, step = str(flags.values["run_dir"]), str(flags.values["out"]), int(flags.values["step"])
        form, merge = str(flags.values["format"]), bool(flags.values["merge_lora"])
        one_of("--format", form, FORMATS)
        require(not (merge and form == "peft"), "--merge_lora", merge, "--format=peft writes adapters; leave one out")
        if flags.values["best"]:
            if step:
                raise ConfigError(f"--step={step}: --best chooses the checkpoint; leave one of them out")
            step = best_step(run_dir, allow_code=bool(flags.values[ALLOW_CODE.name]))
        if form == "peft":
            for folder, name in export_adapters(run_dir, out, step, allow_code=bool(flags.values[ALLOW_CODE.name])):
                print(f"{folder}: {lora_name(name)}, which PeftModel.from_pretrained adds to its model")
            return 0
        if form == "safetensors":
            made = export_folders(run_dir, out, step, allow_code=bool(flags.values[ALLOW_CODE.name]), merge_lora=merge)
            for folder, (modules, tensors) in made.tensors.items():
                print(f"{folder}: {', '.join(modules)} of step {made.step} in {tensors} tensors")
            if made.apart:
                print(f"not one folder of a whole model: {made.apart}")
            if made.without:
                print(f"not written: {', '.join(made.without)}; --format=orbax has all modules")
            return int(bool(made.without))
        done = export_run(run_dir, out, step, merge_lora=merge)
        print(f"{out}: {done.parameters:,} parameters of step {done.step} in {done.leaves} leaves; to read them:")
        print(reading_command(out))
    return 0


def reading_command(out: str | Path) -> str:
    """A command for a shell that reads an export with Orbax alone, which takes no relative path."""
    path = str(Path(out).absolute())
    code = f"from orbax.checkpoint import v1 as ocp; parameters = ocp.load({path!r}); print(*parameters)"
    return f"python -c {shlex.quote(code)}"


def best_step(run_dir: str | Path, *, allow_code: bool = False) -> int:
    """The step of the best checkpoint of a run, by its evaluations and its ``Checkpoint.best``.

    Raises:
      ConfigError: there is no such run, it names no figure, or no checkpoint has been evaluated.
    """
    metric = load_run_config(run_dir, allow_code=allow_code).checkpoint.best
    if not metric:
        raise ConfigError(f"--best: {run_dir} was trained with Checkpoint.best=''; name a checkpoint with --step")
    with importing():
        from mmjax.checkpoint import Checkpointer
        from mmjax.run.best import BestEvaluation
        from mmjax.run.metrics import read_metrics
    path = Path(run_dir) / "eval.jsonl"
    evaluations = BestEvaluation(metric, rows=read_metrics(path) if path.exists() else ())
    step = evaluations.step_among(Checkpointer(Path(run_dir) / "checkpoints").steps())
    if step is None:
        raise ConfigError(f"--best: no checkpoint of {run_dir} has been evaluated; name one with --step")
    return step


def export_run(run_dir: str | Path, out: str | Path, step: int = 0, *, merge_lora: bool = False) -> Exported:
    """Copies the parameters of checkpoint `step` (0: the newest) of `run_dir` into a new Orbax checkpoint `out`.

    Leaves keep their logical names ("llm/layers/000/attn/q"), one nested dict per "/". With `merge_lora` low-rank
    adapters are added to their weights and are no module any more. No device but the host is used.

    Raises:
      ConfigError: there is no such run or checkpoint, `out` exists, or there are no adapters to merge.
      CheckpointError: the checkpoint cannot be read.
    """
    _require_room(out, step)
    with importing():
        import jax

        from mmjax.checkpoint import Checkpointer, export
    checkpointer = Checkpointer(Path(run_dir) / "checkpoints")
    step = _chosen(checkpointer, run_dir, step)
    metadata = checkpointer.metadata(step)
    place = _host()
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        for name, leaf in metadata.leaves.items()
        if name.startswith(PREFIX)
    }
    leaves = checkpointer.restore(step, targets, prefix=PREFIX)
    named = {name.removeprefix(PREFIX): leaf for name, leaf in leaves.items()}
    if merge_lora:
        merged = merged_adapters(named, metadata.config)
        require_adapters(merge_lora, named.keys() - merged.keys())
        named = {name: jax.device_put(leaf, place) for name, leaf in merged.items()}
    about = {name: getattr(metadata, name) for name in ("step", "seed", "config", "versions")} | {"extra": {}}
    try:
        export(named, out, about=about)
    except OSError as error:
        raise ConfigError(f"--out={str(out)!r}: cannot be written ({error.strerror}); name another path") from None
    return Exported(step, len(named), sum(prod(leaf.shape) for leaf in named.values()))


def export_folders(
    run_dir: str | Path, out: str | Path, step: int = 0, *, allow_code: bool = False, merge_lora: bool = False
) -> ExportedFolders:
    """Writes folders of safetensors, as ``save_pretrained`` does, from checkpoint `step` (0: the newest) of `run_dir`.

    A module that started from such a folder gives a copy of it with the run's parameters: tensors keep their keys,
    dtypes and files, and what mmjax does not hold stays as it is. If all modules started from one folder, the copy is
    `out`. If they did not and LLaVA has such a model, `out` is a new folder of a LLaVA; else each folder's copy is
    `out`/<first module>, and a language model that started from none gives a new folder.
    No more than one tensor, or one file of the folder, is in memory. For `merge_lora` see `export_run`.

    Raises:
      ConfigError: there is no such run, checkpoint or folder; `out` exists; no module can be written; or there are no
        adapters to merge.
      CheckpointError: the checkpoint cannot be read.
    """
    _require_room(out, step)
    config = load_run_config(run_dir, allow_code=allow_code)
    with importing():
        from mmjax.checkpoint import Checkpointer, SavedParameters
        from mmjax.config.composed_folder import grown_files, image_token, write_whole
        from mmjax.config.pretrained import folder_parameters, pretrained_folders
        from mmjax.weights.write import rewrite
    checkpointer = Checkpointer(Path(run_dir) / "checkpoints")
    step = _chosen(checkpointer, run_dir, step)
    saved = SavedParameters.find(str(checkpointer.directory / f"{step:08d}"))
    adapters = [lora_name(name) for name in config.layouts if config.lora(name).rank] if merge_lora else []
    require_adapters(merge_lora, adapters)
    read = partial(_read_merged, saved) if merge_lora else partial(_read, saved)
    shapes = {name: leaf.shape for name, leaf in saved.leaves.items() if name.partition("/")[0] not in adapters}
    loras = [lora_name(name) for name in config.loras]
    sources = {path: names for path, names in pretrained_folders(config).items() if not set(names) & set(loras)}
    whole, why = compose_run(config, saved.leaves[f"{LLM}/embed"].shape[0], image_token(config))
    if whole:
        tensors = write_whole(config, whole, read, Path(out))
        without = tuple(name for name in saved.modules if name not in (*adapters, *whole.modules))
        return ExportedFolders(step, {str(out): (whole.modules, tensors)}, without)
    together, made = len(sources) == 1, {}
    for path, modules in sources.items():
        place = Path(out) if together else Path(out) / modules[0]
        found = folder_parameters(config, path, shapes)
        files = grown_files(config, found.folder.config) if LLM in modules else {}
        tensors = rewrite(found.folder, found.places, read, place, copies=found.copies, files=files)
        made[str(place)] = modules, tensors
    copied = [name for names in sources.values() for name in names]
    without = tuple(name for name in saved.modules if name not in (*adapters, *copied))
    if LLM in without and not sources:
        made[str(out)] = (LLM,), _write_new(config, saved, read, Path(out))
        without = tuple(name for name in without if name != LLM)
    if not made:
        raise ConfigError(f"--format=safetensors: no module of {run_dir} has such a folder; use --format=orbax")
    return ExportedFolders(step, made, without, why)


def export_adapters(
    run_dir: str | Path, out: str | Path, step: int = 0, *, allow_code: bool = False
) -> list[tuple[str, str]]:
    """Writes folders of PEFT from checkpoint `step` (0: the newest) of `run_dir`: low-rank adapters alone, in fp32.

    One module's are `out`, those of several `out`/<module>. Weights have the names that a model of the folder has in
    which the module is.

    Returns:
      Each folder and its module.

    Raises:
      ConfigError: there is no such run or checkpoint, or it has no adapters; `out` exists; or PEFT names no such
        adapters.
      CheckpointError: the checkpoint cannot be read.
    """
    _require_room(out, step)
    config = load_run_config(run_dir, allow_code=allow_code)
    with importing():
        from mmjax.checkpoint import Checkpointer, SavedParameters
        from mmjax.config.pretrained import adapted_module
        from mmjax.models.lora.peft import adapter_rows, their_settings
        from mmjax.weights.table import assemble, expand
        from mmjax.weights.write import write_adapters
    checkpointer = Checkpointer(Path(run_dir) / "checkpoints")
    saved = SavedParameters.find(str(checkpointer.directory / f"{_chosen(checkpointer, run_dir, step):08d}"))
    names = [name for name in config.layouts if config.lora(name).rank]
    require(bool(names), "--format", "peft", "the run has no adapters; use another format")
    folders = []
    for name in names:
        module, prefix = adapted_module(config, name), f"{lora_name(name)}/"
        require(bool(module.rows), f"{name}/Lora.rank", module.lora.rank, "no folder of transformers has such a module")
        entries = expand(adapter_rows(module), module.layers)
        leaves = _read(saved, [prefix + entry.leaf for entry in entries])
        tensors = assemble(entries, {leaf.removeprefix(prefix): value for leaf, value in leaves.items()})
        place = Path(out) / name if len(names) > 1 else Path(out)
        write_adapters(their_settings(module, config.pretrained(name)), tensors, place)
        folders.append((str(place), name))
    return folders


def _write_new(config: Config, saved: SavedParameters, stored: Read, out: Path) -> int:
    """A folder for a language model that started from none; its family says how."""
    from mmjax.models.pretrained import family_weights
    from mmjax.weights.table import expand
    from mmjax.weights.write import write

    family = dict(config.model.families)[LLM]
    weights = family_weights(family)
    own = replace(config.modules[LLM], vocab=saved.leaves[f"{LLM}/embed"].shape[0])
    theirs = weights.their_config(own)

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        return {name.removeprefix(f"{LLM}/"): leaf for name, leaf in stored([f"{LLM}/{n}" for n in names]).items()}

    return write(theirs, expand(weights.rows(own, theirs["model_type"]), own.layers), read, out)


def _read_merged(saved: SavedParameters, names: Collection[str]) -> dict[str, np.ndarray]:
    """The same of parameters in which adapters are merged."""
    parts = (name.partition("/") for name in names)
    wanted = [f"{lora_name(module)}/{rest}/{one}" for module, _, rest in parts for one in "ab"]
    read = _read(saved, [*names, *(name for name in wanted if name in saved.leaves)])
    return merged_adapters(read, saved.metadata.config)


def _read(saved: SavedParameters, names: Collection[str]) -> dict[str, np.ndarray]:
    """Leaves in the host's memory."""
    import jax
    import numpy as np

    place = _host()
    targets = {
        name: jax.ShapeDtypeStruct(saved.leaves[name].shape, saved.leaves[name].dtype, sharding=place) for name in names
    }
    return {name: np.asarray(leaf) for name, leaf in saved.read(targets).items()}


def _require_room(out: str | Path, step: int) -> None:
    if step < 0:
        raise ConfigError(f"--step={step}: must be 0 or more, such as 0 for the newest checkpoint")
    if Path(out).exists():
        raise ConfigError(f"--out={str(out)!r} exists: remove it or name another path")


def _chosen(checkpointer: Checkpointer, run_dir: str | Path, step: int) -> int:
    steps = checkpointer.steps()
    if not steps:
        missing = "has no readable checkpoint" if Path(run_dir).is_dir() else "is no directory"
        raise ConfigError(
            f"--run_dir={str(run_dir)!r} {missing}: name the directory of a run, such as 'runs/digits_vlm'"
        )
    if step and step not in steps:
        raise ConfigError(f"--step={step}: there is no such checkpoint; use one of {', '.join(map(str, steps))}")
    return step or steps[-1]


def _host() -> jax.sharding.SingleDeviceSharding:
    """A sharding on the CPU: parameters pass through the host's memory, whatever accelerator is here."""
    import jax

    from mmjax import jax_compat

    if not jax_compat.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
    return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])


if __name__ == "__main__":
    run_command(main)
