"""`mmjax.check` of many configurations by the same processes, whose start costs more than a check.

The argument is a JSON file: by name the files, the bindings and the steps (2) of a configuration. Process 0 prints a
line of JSON for each, in order.
"""

import json
import sys
from pathlib import Path

from mmjax import jax_compat
from mmjax.config import load_config
from mmjax.config.flags import one_line_errors, run_command
from mmjax.mesh.process_group import find_processes
from mmjax.mesh.processes import join
from mmjax.parity import check


def main() -> int:
    with one_line_errors():
        given = json.loads(Path(sys.argv[1]).read_text())
        jax_compat.compile_cheaply()
        join(find_processes({}))
        for name, one in given.items():
            report = check(load_config(one["files"], one["bindings"]), steps=one.get("steps", 2), style="silent")
            if report:
                print(json.dumps({"name": name, **report.numbers()}), flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
