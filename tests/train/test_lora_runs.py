"""Runs that train adapters of a base from another run: what is saved, restored and exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from trial_runs import ALONE, STEPS, assert_same_leaves, leaves, write_tiny

from mmjax.checkpoint import Checkpointer, CheckpointError
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.export.parameters import export_run
from mmjax.parity.compare import of_kind, of_module
from mmjax.recipe import Recipe
from mmjax.recipe.advice import advise
from mmjax.train.starts import find_starts
from mmjax.train.trainer import Trainer

BASE = ("vision", "vision_projector", "llm")


def adapting(folder: Path, base: Path, *more: str) -> Recipe:
    """Adapters of the LLM, everything else frozen and from another run."""
    return load_config(
        [write_tiny(folder)],
        [
            *ALONE,
            *(f"{name}/Optimizer.frozen=True" for name in BASE),
            *("llm/Lora.rank=2", "llm/Lora.targets=('attn/q', 'mlp/down')", "Train.steps=4"),
            *(f"Checkpoint.init_from={str(base)!r}", "llm_lora/Weights.init_from='fresh'", *more),
        ],
    )


@pytest.mark.long
def test_the_base_stays_in_its_own_folder(tiny_run: Path, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    export_run(tiny_run, base)
    config = adapting(tmp_path, base, "Checkpoint.copy_frozen=False")
    with Trainer(config, run, style="silent") as trainer:
        trainer.train(steps=2)
        trained = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}
    started = of_kind(leaves(tiny_run, STEPS), "params")
    for module in BASE:
        assert_same_leaves(of_module(of_kind(trained, "params"), module), of_module(started, module))
    assert all(leaf.any() for name, leaf in trained.items() if name.endswith("/b"))
    written = sum(path.stat().st_size for path in (run / "checkpoints" / "00000002" / "state").rglob("*"))
    assert written < sum(path.stat().st_size for path in (base / "state").rglob("*"))
    stored = Checkpointer(run / "checkpoints").metadata(2).leaves
    assert {name.split("/")[1] for name, leaf in stored.items() if not leaf.folder} == {"llm_lora"}
    assert (stored["params/llm/embed"].folder, stored["params/llm/embed"].name) == (str(base), "llm/embed")
    # A run that goes on, an export and another run read the base from its folder.
    with Trainer(config, run, style="silent") as trainer:
        assert_same_leaves({name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}, trained)
        trainer.train(steps=3)
    stored = Checkpointer(run / "checkpoints").metadata(3).leaves
    assert {name.split("/")[1] for name, leaf in stored.items() if not leaf.folder} == {"llm_lora"}
    done = export_run(run, tmp_path / "merged", merge_lora=True)
    assert done.parameters == sum(leaf.size for leaf in started.values())
    # Gone or changed, it is named.
    shutil.move(base, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"needs {base}, which has its frozen modules and is gone; bring it back"):
        Trainer(config, run, style="silent")
    export_run(tiny_run, base, step=STEPS - 2)
    with pytest.raises(CheckpointError, match=f"{base} has changed since .*00000003, which needs params/.* of it"):
        Trainer(config, run, style="silent")


@pytest.mark.long
def test_an_export_with_merged_adapters_computes_the_same(tiny_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Trainer(adapting(tmp_path, tiny_run), run, style="silent") as trainer:
        trainer.train(steps=2)
        adapted = trainer.train(steps=3).losses
        held = of_kind({name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}, "params")
    stored = Checkpointer(run / "checkpoints").metadata(2).leaves
    assert not any(leaf.folder for leaf in stored.values()), "nothing asked for it"
    export_run(run, tmp_path / "merged", step=2, merge_lora=True)
    plain = load_config(
        [write_tiny(tmp_path)], [*ALONE, "Train.steps=4", f"Checkpoint.init_from={str(tmp_path / 'merged')!r}"]
    )
    with Trainer(plain, style="silent") as trainer:
        merged = of_kind({name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}, "params")
        # Its first step sees the samples of step 0; the loss of the adapted run's third step is on those of step 2.
        trainer.state.step = 2
        assert trainer.train(steps=3).losses == pytest.approx(adapted, rel=1e-5)
    assert merged.keys() == {name for name in held if "_lora/" not in name}
    moved = {name for name in merged if not np.array_equal(merged[name], held[name])}
    assert moved == {f"llm/layers/{i:03d}/{weight}" for i in range(2) for weight in ("attn/q", "mlp/down")}
    with pytest.raises(ConfigError, match="--merge_lora=True: the run has no adapters; leave the flag out"):
        export_run(tiny_run, tmp_path / "other", merge_lora=True)


@pytest.mark.long
def test_what_is_said_before_any_device(tiny_run: Path, tmp_path: Path) -> None:
    config = adapting(tmp_path, tiny_run)
    assert not any("Lora" in line for line in advise(config))
    trained = adapting(tmp_path, tiny_run, "llm/Optimizer.frozen=False")
    line = "llm/Lora.rank=2: llm is trained too; llm/Optimizer.frozen=True trains adapters alone"
    assert line in advise(trained)
    with pytest.raises(ConfigError, match="has vision, vision_projector, llm and no module 'llm_lora'; name another"):
        find_starts(adapting(tmp_path, tiny_run, "llm_lora/Weights.init_from=''"))
    hint = "vision has no adapters; set vision/Lora.rank, such as to 8"
    with pytest.raises(ConfigError, match=f"Optimizer has no scope 'vision_lora'; {hint}"):
        adapting(tmp_path, tiny_run, "vision_lora/Optimizer.frozen=True")
    with pytest.raises(ConfigError, match="is the name of vision's adapters; use another, such as 'vision_lora2'"):
        adapting(tmp_path, tiny_run, "Model.encoders={'vision': 'vit', 'vision_lora': 'vit'}")
