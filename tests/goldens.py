"""Twenty steps of the digits configurations, kept so that a change of structure can be told from a change of numbers.

python tests/goldens.py [NAME …]                    compares with tests/goldens.json, loosely: another machine made it
python tests/goldens.py --write=FILE [NAME …]       makes such a file
python tests/goldens.py --exact=FILE [NAME …]       compares bit for bit with a file that this machine has made
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(__file__).with_name("goldens.json")
NAMES = (
    *("digits_vlm", "digits_vlm_colocated", "digits_vlm_homogeneous", "digits_vlm_one_device"),
    *("digits_valm", "digits_draw"),
)
STEPS = 20
START, LOSS = 1e-5, 1e-3
"""Relative limits of initial norms and of losses. Machines round otherwise, and training amplifies it."""


def golden(name: str) -> dict[str, Any]:
    """Norms of the initial leaves of a configuration, the losses of its first steps, and norms of the leaves then."""
    from mmjax.config import load_config
    from mmjax.train.trainer import Trainer

    config = load_config([str(ROOT / "configs" / f"{name}.gin")])
    train = replace(config.train, eval_samples=0, eval_every=0)
    with Trainer(replace(config, train=train, data=config.data.with_settings(workers=0)), style="silent") as trainer:
        initial = norms(trainer.leaves())
        losses = [float(loss) for loss in trainer.train(STEPS).losses]
        return {"initial": initial, "losses": losses, "trained": norms(trainer.leaves())}


def norms(leaves: dict[str, Any]) -> dict[str, float]:
    """The norm of each parameter, by the leaf's name."""
    arrays = {name: np.asarray(leaf, np.float64) for name, leaf in leaves.items() if name.startswith("params/")}
    return {name: float(np.sqrt(np.vdot(array, array))) for name, array in sorted(arrays.items())}


def difference(got: dict[str, Any], want: dict[str, Any], *, exact: bool) -> str:
    """One line on the first difference between `got` and `want`; empty where they agree."""
    if exact:
        return next((f"{key} differ" for key in want if got[key] != want[key]), "")
    if got["initial"].keys() != want["initial"].keys():
        return f"other leaves: {sorted(got['initial'].keys() ^ want['initial'].keys())}"
    start = max((relative(got["initial"][leaf], norm), leaf) for leaf, norm in want["initial"].items())
    if start[0] > START:
        return f"{start[1]} starts with a norm that is {start[0]:.1e} off"
    off = [relative(one, other) for one, other in zip(got["losses"], want["losses"], strict=True)]
    worst = max(range(STEPS), key=lambda step: off[step])
    return f"the loss of step {worst + 1} is {off[worst]:.1e} off" if off[worst] > LOSS else ""


def relative(got: float, want: float) -> float:
    """The relative difference."""
    return abs(got - want) / max(abs(want), 1e-30)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes or compares; the exit status is 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--exact", type=Path)
    flags = parser.parse_args(argv)
    if wrong := set(flags.names) - set(NAMES):
        parser.error(f"{', '.join(sorted(wrong))}: not one of {', '.join(NAMES)}")
    found = {}
    for name in flags.names or NAMES:
        found[name] = golden(name)
        print(f"{name}: loss {found[name]['losses'][0]:.4f} to {found[name]['losses'][-1]:.4f}", flush=True)
    if flags.write:
        flags.write.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    kept = json.loads((flags.exact or KEPT).read_text())
    off = {name: difference(own, kept[name], exact=bool(flags.exact)) for name, own in found.items()}
    for name, text in off.items():
        print(f"{name}: {text or 'as kept'}")
    return int(any(off.values()))


if __name__ == "__main__":
    sys.exit(main())
