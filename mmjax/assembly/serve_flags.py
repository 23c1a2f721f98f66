"""Reads the command line and the configuration for ``mmjax.serve``, in a process of its own.

The server must not import JAX, and reading a configuration does. This process writes one JSON object, with flags and
data spec, to the file descriptor ``--answer``, and ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from mmjax.config import load_config
from mmjax.config.flags import Flag, one_line_errors, parse_flags, require_gin_file, run_command
from mmjax.configurable import require
from mmjax.data.service.addresses import TOKEN, is_loopback, read_pair, read_token
from mmjax.flags import importing

USAGE = "python -m mmjax.serve"
FLAGS = (
    Flag(name="host", doc="address to listen on; any but this host's own needs a token and TLS.", default="127.0.0.1"),
    Flag(name="port", doc="port to listen on; 0 takes a free one, which is printed.", default=8815),
    Flag(
        name="run_dir", doc="the trainer's, where it goes on with data that have changed: what it holds out stays so."
    ),
    Flag(name="workers", doc="processes that prepare batches; 0 is one for each core.", default=0),
    Flag(name="token_file", doc=f"file that holds the token which trainers must have; or {TOKEN} in the environment."),
    Flag(name="tls_cert", doc="certificate chain (PEM) of this host, for grpc+tls."),
    Flag(name="tls_key", doc="its key (PEM)."),
)
_ANSWER = "--answer="


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the command line and the configuration of a data server; returns the exit status 0.

    Args:
      argv: the arguments without the program's name, such as ["--gin_file=run.gin", "--port=0"]; by default those of
        this process. "--answer=N", if it is there, comes first: flags and data spec are written as JSON to the file
        descriptor N.

    Raises:
      SystemExit: with status 2, after a line on stderr about a wrong flag or setting; also after --help.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    answer = arguments.pop(0).removeprefix(_ANSWER) if arguments[:1] and arguments[0].startswith(_ANSWER) else ""
    with one_line_errors():
        flags = parse_flags(arguments, FLAGS, USAGE)
        require_gin_file(flags, "the trainer's")
        _check(flags.values)
        recipe = load_config(flags.gin_files, flags.bindings, allow_code=flags.allow_code)
        with importing():
            from mmjax.assembly.assembly import planned_batch_spec
            from mmjax.assembly.data_state import known_in
        if run_dir := str(flags.values["run_dir"]):
            recipe = known_in(recipe, run_dir)
        spec = planned_batch_spec(recipe)
        spec.maker()  # the data can be read
    if answer:
        with open(int(answer), "w") as file:
            json.dump({"flags": dict(flags.values), "spec": spec.to_json()}, file)
    return 0


def _check(values: dict[str, str | int | bool] | object) -> None:
    assert isinstance(values, dict)
    host, port, workers = str(values["host"]), int(values["port"]), int(values["workers"])
    cert, key = str(values["tls_cert"]), str(values["tls_key"])
    require(0 <= port < 65536, "--port", port, "must be 0 to 65535, such as 8815")
    require(0 <= workers <= 1024, "--workers", workers, "must be 0 to 1024, such as 0 for one on each core")
    require(bool(host), "--host", host, "must be an address of this host, such as '127.0.0.1'")
    read_pair(cert, key)
    token = read_token("--token_file", str(values["token_file"]))
    if not is_loopback(host):
        open_to = "can be reached from elsewhere and"
        require(bool(token), "--host", host, f"{open_to} needs a token; add --token_file=FILE, or set {TOKEN}")
        require(bool(cert), "--host", host, f"{open_to} needs TLS; add --tls_cert=FILE --tls_key=FILE")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    run_command(main)
