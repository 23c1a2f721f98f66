"""Small planning problems, and their best plans by trying everything, in exact fractions, without the planner."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from typing import Any


def drawn_problem(seed: int, *, sent: bool = False) -> dict[str, Any]:
    """A random problem of one to four modules, some of which has no plan. sent: with communication and chunks."""
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
        if sent:
            more = random.Random(f"{seed} {name}")
            modules[name] |= {"sent_bytes": more.choice([0, 1, 4, 16]), "chunks": more.choice([1, 1, 1, 2])}
    return {
        **({"bandwidth": random.Random(f"{seed}").choice([4, 16, 64])} if sent else {}),
        "devices": rng.randint(3, 14),
        "global_batch": batch,
        "microbatch": rng.choice([1, 1, 2]),
        "memory": rng.choice([8, 12, 20, 30, 1000]),
        "modules": modules,
    }


def best_by_trying(problem: dict[str, Any]) -> tuple[Fraction, int] | None:
    """The shortest step and the fewest devices on which it can be had; None without any plan."""
    batch, microbatch = problem["global_batch"], problem["microbatch"]
    kinds = problem.get("kinds") or {"": {"devices": problem["devices"], "memory": problem["memory"]}}
    degrees = [dp for dp in range(1, batch + 1) if batch % dp == 0]
    best = None
    for llm_dp in degrees:
        if batch % (llm_dp * microbatch):
            continue
        choices = [
            [(kind, *choice) for kind, own in kinds.items() for choice in _choices(problem, own, kind, name, llm_dp)]
            for name in problem["modules"]
        ]
        for chosen in itertools.product(*choices):
            if any(sum(one[3] for one in chosen if one[0] == kind) > own["devices"] for kind, own in kinds.items()):
                continue
            devices = sum(choice[3] for choice in chosen)
            step = sum(choice[1] for choice in chosen) + max(choice[2] for choice in chosen)
            best = min(best or (step, devices), (step, devices))
    return best


def _choices(
    problem: dict[str, Any], own: dict[str, Any], kind: str, name: str, llm_dp: int
) -> set[tuple[Fraction, Fraction, int]]:
    """(time through all stages, time of all further microbatches and what follows them, devices) of a module's layouts
    on a kind; none that is worse in all three.

    own: devices and memory of the kind.
    """
    module, found = problem["modules"][name], set()
    chunks, sent = module.get("chunks", 1), Fraction(module.get("sent_bytes", 0), problem.get("bandwidth", 1))
    steps = problem["global_batch"] // (llm_dp * problem["microbatch"]) - 1
    times = module["kinds"].get(kind, {"fwd": {}}) if kind else module
    for tp in map(int, times["fwd"]):
        sample = Fraction(times["fwd"][str(tp)]) + Fraction(times["bwd"][str(tp)])
        batch = problem["global_batch"]
        for dp in [llm_dp] if name == "llm" else [dp for dp in range(1, batch + 1) if batch % dp == 0]:
            samples = Fraction(llm_dp * problem["microbatch"], dp)
            for pp in range(1 if chunks == 1 else 2, own["devices"] // (tp * dp) + 1):
                if "layers" in module and module["layers"] % (pp * chunks):
                    continue
                held = Fraction(module["param_bytes"], tp * pp) + Fraction(module["optimizer_bytes"], tp * dp * pp)
                held += Fraction(llm_dp * module["activation_bytes"], dp * tp)
                if held <= own["memory"]:
                    passed = samples * sent * chunks * (1 + any(times["bwd"].values()))
                    stage = samples * sample / pp + passed
                    once = Fraction(module["param_bytes"] if module["optimizer_bytes"] else 0, tp * pp) * (dp - 1) / dp
                    once = once / problem["bandwidth"] if "bandwidth" in problem else 0
                    found.add((stage * pp / chunks, stage * steps + once, tp * dp * pp))
    return {
        one for one in found if not any(all(a <= b for a, b in zip(two, one, strict=True)) for two in found - {one})
    }
