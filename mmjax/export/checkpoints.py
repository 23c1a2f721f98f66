"""The checkpoint of a run that is exported, and its leaves in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmjax.config import load_run_config
from mmjax.configurable import ConfigError
from mmjax.flags import importing
from mmjax.models.config import lora_name
from mmjax.models.lora.merging import merged_adapters

if TYPE_CHECKING:  # see `importing`
    import jax
    import numpy as np

    from mmjax.checkpoint import Checkpointer, SavedParameters
Read = Callable[[Collection[str]], Mapping[str, "np.ndarray"]]
"""Reads the leaves of these names, such as "llm/embed", into the host's memory; returns whole arrays by name."""
PREFIX = "params/"


def best_step(run_dir: str | Path, *, allow_code: bool = False) -> int:
    """The step of the best checkpoint of a run, by its evaluations and its ``Checkpoint.best``.

    Args:
      run_dir: the run's directory.
      allow_code: whether its settings may name code of one's own, which is run.

    Raises:
      ConfigError: there is no such run, it names no figure, or no checkpoint has been evaluated.
    """
    metric = load_run_config(run_dir, allow_code=allow_code).checkpoint.best
    if not metric:
        raise ConfigError(f"--best: {run_dir} was trained with Checkpoint.best=''; name a checkpoint with --step")
    with importing():
        from mmjax.checkpoint import Checkpointer
        from mmjax.train.best import BestEvaluation
        from mmjax.train.metrics import read_metrics
    path = Path(run_dir) / "eval.jsonl"
    evaluations = BestEvaluation(metric, rows=read_metrics(path) if path.exists() else ())
    step = evaluations.step_among(Checkpointer(Path(run_dir) / "checkpoints").steps())
    if step is None:
        raise ConfigError(f"--best: no checkpoint of {run_dir} has been evaluated; name one with --step")
    return step


def read_merged(saved: SavedParameters, names: Collection[str]) -> dict[str, np.ndarray]:
    """Reads leaves into the host's memory, with low-rank adapters added to the weights that have any.

    Args:
      saved: the parameters of a checkpoint, adapters among them, as ``SavedParameters.find(path)`` opens them.
      names: names of leaves that are no adapters, such as "llm/embed".

    Returns:
      Whole arrays by these names, in the dtype that they are stored in.

    Raises:
      KeyError: there is no leaf of a name.
      CheckpointError: a leaf cannot be read.
    """
    parts = (name.partition("/") for name in names)
    factors = [f"{lora_name(module)}/{weight}/{factor}" for module, _, weight in parts for factor in "ab"]
    leaves = read_leaves(saved, [*names, *(name for name in factors if name in saved.leaves)])
    return merged_adapters(leaves, saved.metadata.config)


def read_leaves(saved: SavedParameters, names: Collection[str]) -> dict[str, np.ndarray]:
    """Reads leaves into the host's memory; returns whole arrays by name, in the dtype that they are stored in.

    Args:
      saved: the parameters of a checkpoint, as ``SavedParameters.find(path)`` opens them.
      names: names of leaves, such as "llm/layers/000/attn/q".

    Raises:
      KeyError: there is no leaf of a name.
      CheckpointError: a leaf cannot be read.
    """
    import jax
    import numpy as np

    place = host_memory()
    targets = {
        name: jax.ShapeDtypeStruct(saved.leaves[name].shape, saved.leaves[name].dtype, sharding=place) for name in names
    }
    return {name: np.asarray(leaf) for name, leaf in saved.read(targets).items()}


def require_out(out: str | Path, step: int) -> None:
    """Raises ConfigError where `out` exists or `step` is negative."""
    if step < 0:
        raise ConfigError(f"--step={step}: must be 0 or more, such as 0 for the newest checkpoint")
    if Path(out).exists():
        raise ConfigError(f"--out={str(out)!r} exists: remove it or name another path")


def chosen_step(checkpointer: Checkpointer, run_dir: str | Path, step: int) -> int:
    """`step`, or the newest step where it is 0.

    Args:
      checkpointer: the run's checkpoints, ``Checkpointer(run_dir / "checkpoints")``.
      run_dir: the run's directory, for messages.
      step: the step of a checkpoint, or 0.

    Raises:
      ConfigError: there is no such checkpoint, or none at all.
    """
    steps = checkpointer.steps()
    if not steps:
        missing = "has no readable checkpoint" if Path(run_dir).is_dir() else "is no directory"
        raise ConfigError(
            f"--run_dir={str(run_dir)!r} {missing}: name the directory of a run, such as 'runs/digits_vlm'"
        )
    if step and step not in steps:
        raise ConfigError(f"--step={step}: there is no such checkpoint; use one of {', '.join(map(str, steps))}")
    return step or steps[-1]


def host_memory() -> jax.sharding.SingleDeviceSharding:
    """A sharding on the CPU: parameters pass through the host's memory, whatever accelerator is here.

    Where no backend is started yet, JAX is set to the CPU alone, for the whole process.
    """
    import jax

    from mmjax import jax_compat

    if not jax_compat.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
    return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
