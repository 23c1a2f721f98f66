"""Small planning problems, and their best plans by exhaustive search, in exact fractions, without the planner."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from typing import Any


def drawn_problem(seed: int, *, communication: bool = False) -> dict[str, Any]:
    """A random problem of one to four modules; some problems have no plan.

    Args:
      seed: of the draw.
      communication: whether the problem has communication and chunks.
    """
    rng = random.Random(seed)
    batch = rng.choice([4, 6, 8, 12, 16])
    names = ["llm", "vision", "audio", "generator"][: rng.randint(1, 4)]
    rng.shuffle(names)
    modules = {}
    for name in names:
        seconds = rng.choice([2**-7, 2**-7, 0.75, 1, 2, 3, 4, 8, 12])  # exact in binary, so that ties are ties
        forward = {
            str(tp): seconds / tp * rng.choice([1, 1.25, 1.5])
            for tp in sorted(rng.sample([1, 2, 4, 8], rng.randint(1, 3)))
        }
        frozen = rng.choice([0, 1, 2])
        modules[name] = {
            "fwd": forward,
            "bwd": {tp: frozen * cost for tp, cost in forward.items()},
            "param_bytes": rng.choice([0, 4, 8, 20]),
            "optimizer_bytes": rng.choice([0, 8, 24]),
            **({"layers": rng.choice([4, 6])} if rng.random() < 0.3 else {}),
            "activation_bytes": rng.choice([0, 1, 4, 10, 20]),
        }
        if communication:
            rng_of_module = random.Random(f"{seed} {name}")
            modules[name] |= {
                "sent_bytes": rng_of_module.choice([0, 1, 4, 16]),
                "chunks": rng_of_module.choice([1, 1, 1, 2]),
            }
    return {
        **({"bandwidth": random.Random(f"{seed}").choice([4, 16, 64])} if communication else {}),
        "devices": rng.randint(3, 14),
        "global_batch": batch,
        "microbatch": rng.choice([1, 1, 2]),
        "memory": rng.choice([8, 12, 20, 30, 1000]),
        "modules": modules,
    }


def best_by_trying(problem: dict[str, Any]) -> tuple[Fraction, int] | None:
    """The shortest step, and the fewest devices that reach it; None if there is no plan."""
    batch, microbatch = problem["global_batch"], problem["microbatch"]
    kinds = problem.get("kinds") or {"": {"devices": problem["devices"], "memory": problem["memory"]}}
    degrees = [dp for dp in range(1, batch + 1) if batch % dp == 0]
    best = None
    for llm_dp in degrees:
        if batch % (llm_dp * microbatch):
            continue
        choices = [
            [
                (kind, *choice)
                for kind, resources in kinds.items()
                for choice in _choices(problem, name, kind=kind, resources=resources, llm_dp=llm_dp)
            ]
            for name in problem["modules"]
        ]
        for chosen in itertools.product(*choices):
            used = {kind: sum(choice[3] for choice in chosen if choice[0] == kind) for kind in kinds}
            if any(used[kind] > resources["devices"] for kind, resources in kinds.items()):
                continue
            devices = sum(choice[3] for choice in chosen)
            step = sum(choice[1] for choice in chosen) + max(choice[2] for choice in chosen)
            best = min(best or (step, devices), (step, devices))
    return best


def _choices(
    problem: dict[str, Any], name: str, *, kind: str, resources: dict[str, Any], llm_dp: int
) -> set[tuple[Fraction, Fraction, int]]:
    """The layouts of a module on a kind of device, without layouts that are worse than another in all respects.

    Args:
      problem: the problem.
      name: the module.
      kind: the kind of device.
      resources: devices and memory of the kind.
      llm_dp: dp of the LLM.

    Returns:
      For each layout, the time of a microbatch through all stages; the time of all further microbatches and of
      reductions after them; and the number of devices.
    """
    module, layouts = problem["modules"][name], set()
    chunks, move = module.get("chunks", 1), Fraction(module.get("sent_bytes", 0), problem.get("bandwidth", 1))
    steps = problem["global_batch"] // (llm_dp * problem["microbatch"]) - 1
    times = module["kinds"].get(kind, {"fwd": {}}) if kind else module
    for tp in map(int, times["fwd"]):
        sample = Fraction(times["fwd"][str(tp)]) + Fraction(times["bwd"][str(tp)])
        batch = problem["global_batch"]
        for dp in [llm_dp] if name == "llm" else [dp for dp in range(1, batch + 1) if batch % dp == 0]:
            samples = Fraction(llm_dp * problem["microbatch"], dp)
            for pp in range(1 if chunks == 1 else 2, resources["devices"] // (tp * dp) + 1):
                if "layers" in module and module["layers"] % (pp * chunks):
                    continue
                bytes_used = Fraction(module["param_bytes"], tp * pp) + Fraction(
                    module["optimizer_bytes"], tp * dp * pp
                )
                bytes_used += Fraction(llm_dp * module["activation_bytes"], dp * tp)
                if bytes_used <= resources["memory"]:
                    moves = samples * move * chunks * (1 + any(times["bwd"].values()))
                    stage = samples * sample / pp + moves
                    after = Fraction(module["param_bytes"] if module["optimizer_bytes"] else 0, tp * pp) * (dp - 1) / dp
                    after = after / problem["bandwidth"] if "bandwidth" in problem else 0
                    layouts.add((stage * pp / chunks, stage * steps + after, tp * dp * pp))
    return {
        layout
        for layout in layouts
        if not any(all(a <= b for a, b in zip(better, layout, strict=True)) for better in layouts - {layout})
    }
