"""`python -m mmjax.profile --gin_file=F --out=profile.json [--quick] [--json]`: measures times for plans.

Compiles and times short stages of every module, with the programs of training, as well as collectives and moves, on the
devices of this host. Several processes make one profile together. The result is a small file that names the device, for
`mmjax.plan --profile`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from mmjax.config import load_config
from mmjax.config.flags import (
    PROCESS_FLAGS,
    Flag,
    join_processes,
    one_line_errors,
    parse_flags,
    require_gin_file,
    run_command,
)
from mmjax.flags import importing
from mmjax.planner.profile_file import Compiled, Profile, Trial, require_writable, write_profile
from mmjax.planner.work import StagePart

FLAGS = (
    Flag(name="out", doc="the JSON file to write; it is written whole or not at all.", required=True),
    Flag(name="quick", doc="fewer shapes and sizes: for a first look.", default=False),
    Flag(name="json", doc="prints the profile as one line of JSON.", default=False),
    *PROCESS_FLAGS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures a profile, writes it to the file of --out and prints it; returns the exit status 0.

    argv: the arguments without the program's name, such as ["--gin_file=run.gin", "--out=profile.json"]; None takes the
      process's.

    Raises:
      SystemExit: the input is not legal (status 2), or Ctrl-C (130); also after --help.
    """
    with one_line_errors("interrupted: no profile was written"):
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, "python -m mmjax.profile")
        require_gin_file(flags)
        recipe = load_config(flags.gin_files, flags.bindings, allow_code=flags.allow_code)
        out = str(flags.values["out"])
        require_writable(out)
        with importing():
            from mmjax.mesh.processes import is_first
            from mmjax.profile.profiler import profile_of
        join_processes(flags)
        profile = profile_of(recipe, quick=bool(flags.values["quick"]))
        if not is_first():
            return 0
        write_profile(profile, out)
    if flags.values["json"]:
        print(json.dumps(profile.as_json()))
    else:
        print("\n".join(table(profile)))
        print(f"profile in {out}")
    return 0


def table(profile: Profile) -> Iterator[str]:
    """Yields a profile as lines of text without newlines: the device, every compiled stage, the data and the links.

    profile: as `profile_of(recipe)` or `read_profile(path)` gives it.
    """
    yield f"{profile.source}, {profile.dtype}"
    yield (
        f"{'':16}{'layers':>8}{'ends':>14}{'tp':>5}{'rows':>7}{'width':>7}{'forward ms':>13}{'backward ms':>13}"
        f"{'forward MB':>13}{'backward MB':>13}"
    )
    times = {_key(trial): trial for trial in profile.trials}
    for stage in profile.compiled:
        ends = " ".join(name for name, has in (("first", stage.part.first), ("last", stage.part.last)) if has)
        trial = times.get(_key(stage))
        seconds = (trial.forward, trial.backward) if trial else ()
        yield (
            f"{stage.module:16}{stage.part.layers:>8}{ends:>14}{stage.tp:>5}{stage.rows:>7}{stage.width:>7}"
            f"{''.join(f'{value * 1e3:>13.3f}' for value in seconds):26}"
            f"{stage.forward / 1e6:>13.4g}{stage.backward / 1e6:>13.4g}"
        )
    for name, lengths in profile.data.items():
        keys = ("mean", "median", "p90", "p99", "most", "per_sample")
        figures = ", ".join(f"{key} {lengths[key]:.4g}" for key in keys)
        yield f"{name}: {lengths['count']:.0f} segments, {figures}"
    transfers = {"move": profile.moves}
    transfers |= {f"all-gather over {ranks}": samples for ranks, samples in profile.gathers.items()}
    transfers |= {f"all-to-all over {ranks}": samples for ranks, samples in profile.all_to_alls.items()}
    transfers |= {f"all-reduce over {ranks}": samples for ranks, samples in profile.reduces.items()}
    for name, samples in transfers.items():
        yield f"{name}: " + ", ".join(f"{size:.0f} bytes {seconds * 1e3:.3g} ms" for size, seconds in samples)
    yield f"an op takes {profile.op * 1e6:.0f} µs of the host; {profile.shared:.3g} devices work at a time"


def _key(stage: Trial | Compiled) -> tuple[str, StagePart, int, int, int]:
    return stage.module, stage.part, stage.tp, stage.rows, stage.width


if __name__ == "__main__":
    run_command(main)
