"""Trains a small model of a graph other than "encoders, LLM, generators" on the bundled digits, on virtual devices.

    python examples/graphs.py clip --run_dir=runs/clip      # vision -> temporal -> llm
    python examples/graphs.py redraw --run_dir=runs/redraw  # vision -> llm -> painter, vision -> painter
    python examples/graphs.py speak --run_dir=runs/speak    # vision -> llm -> talker

`--check` compares its layouts with the dense reference instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import mmjax as mm

VISION = mm.ViTConfig(layers=2, width=64, heads=4, mlp=192)
TEMPORAL = mm.TemporalConfig(layers=2, width=64, heads=4, mlp=192)
DECODER = mm.DecoderConfig(layers=3, width=64, heads=4, kv_heads=4, mlp=160)
TALKER = mm.DecoderConfig(layers=2, width=64, heads=4, kv_heads=4, mlp=160, vocab=11)
PAINTER = mm.DiTConfig(layers=3, width=64, heads=4, mlp=192, patch=2, merge=4)
GRAPHS: Mapping[str, tuple[Sequence[mm.ModuleSpec], Sequence[str]]] = {
    "clip": (
        [mm.encoder("vision", VISION), mm.encoder("temporal", TEMPORAL), mm.language_model(DECODER)],
        ["vision -> temporal", "temporal -> llm"],
    ),
    "redraw": (
        [mm.encoder("vision", VISION), mm.language_model(DECODER), mm.generator("painter", PAINTER)],
        ["vision -> llm", "llm -> painter", "vision -> painter"],
    ),
    "speak": (
        [mm.encoder("vision", VISION), mm.language_model(DECODER), mm.generator("talker", TALKER)],
        ["vision -> llm", "llm -> talker"],
    ),
}
"""The nodes of each graph, sources before targets, and its edges."""
LAYOUTS = {
    "vision": mm.Layout(dp=2),
    "temporal": mm.Layout(tp=2, rank_offset=2),
    "llm": mm.Layout(tp=2, pp=2, rank_offset=4),
    "painter": mm.Layout(dp=2, rank_offset=2),
    "talker": mm.Layout(tp=2, rank_offset=2),
}


def make_recipe(graph: str, steps: int) -> mm.Recipe:
    """The recipe of a graph on eight virtual devices; ``graph`` is a key of ``GRAPHS``."""
    nodes, edges = GRAPHS[graph]
    model = mm.ModelSpec.of(*nodes, edges=edges)
    return mm.Recipe(
        model=model.with_layouts({name: LAYOUTS[name] for name in model}),
        data=mm.DataConfig(sequence_length=64),
        task=mm.DigitsConfig(images=(1, 2), digits=(1, 1), scale=(0.85, 1.0), draw=3.0 * (graph == "redraw")),
        optimizer=mm.adamw(0.0012, warmup=20 * (steps > 20)),
        train=mm.TrainConfig(steps=steps, global_batch=32, eval_samples=60),
        schedule=mm.one_f_one_b(microbatches=2),
        world=mm.WorldConfig(platform="cpu", devices=8),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", choices=GRAPHS)
    parser.add_argument("--run_dir", default="")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    run = mm.build(make_recipe(arguments.graph, arguments.steps))
    if arguments.check:
        report = run.check()
        print("equal" if report and report.ok else report)
        return
    result = run.train(run_dir=arguments.run_dir or f"runs/{arguments.graph}")
    print(f"{result.step} steps, loss {result.losses[-1]:.4g}" if result.losses else "nothing is left to do")


if __name__ == "__main__":
    main()
