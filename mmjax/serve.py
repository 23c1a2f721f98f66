"""``python -m mmjax.serve --gin_file=F [--port=8815] [--workers=N]``: prepares batches for trainers elsewhere.

Start it with the same ``--gin_file`` and ``--gin.…`` as the trainer. This process and its workers never import JAX:
a child, which ends before the first batch is made, reads the configuration.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.worker import forbid_jax
from mmjax.flags import one_line_errors, run_plain

NEWS = 10.0
"""Seconds between lines about served batches."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or Ctrl-C, which are its normal ends; returns the exit status 0.

    Args:
      argv: the arguments, without the program's name, such as ["--gin_file=run.gin", "--port=8815"]; by default this
        process's.

    Raises:
      SystemExit: a flag or setting is wrong, the port is not free, or after `--help`.
    """
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    values, spec = _read(list(sys.argv[1:] if argv is None else argv))
    if stopping.is_set():
        return 0
    forbid_jax()
    with one_line_errors():
        return _serve(values, spec, stopping)


def _read(argv: list[str]) -> tuple[dict[str, Any], Any]:
    """Reads flags and data spec in a child process, which itself prints errors and help."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "mmjax.assembly.serve_flags", f"--answer={write_end}", *argv]
    # The child needs no device, and must not allocate the memory of an accelerator by accident.
    child = subprocess.Popen(command, pass_fds=[write_end], env={**os.environ, "JAX_PLATFORMS": "cpu"})
    os.close(write_end)
    with open(read_end, "rb") as answer:
        text = answer.read()
    status = child.wait()
    if status or not text:
        raise SystemExit(status if status >= 0 else 128 - status)
    settings = json.loads(text)
    return settings["flags"], settings["spec"]


def _serve(values: dict[str, Any], description: Any, stopping: threading.Event) -> int:
    # Imported only now that JAX is forbidden.
    from mmjax.data.batch_spec import BatchSpec
    from mmjax.data.service.addresses import PLAIN, TLS, read_pair, read_token
    from mmjax.data.service.server import BatchServer, require_free

    spec, host, port = BatchSpec.from_json(description), values["host"], values["port"]
    token, tls = read_token("--token_file", values["token_file"]), read_pair(values["tls_cert"], values["tls_key"])
    scheme, shown_host = TLS if tls else PLAIN, f"[{host}]" if ":" in host else host
    workers = values["workers"] or len(os.sched_getaffinity(0))
    try:
        require_free(host, port)
        server = BatchServer(spec, workers, f"{scheme}://{shown_host}:{port}", token, tls)
    except OSError as error:
        cause = error.strerror or str(error).partition(". ")[0]
        fix = "another process may have the port, or the address is not of this host; --port=0 takes a free one"
        raise ConfigError(f"--port={port}: cannot listen on {host} ({cause}): {fix}") from None
    try:
        print(f"{workers} workers, {spec.data.settings.task}, global batch {spec.global_batch}, seed {spec.seed}")
        print(f"configuration {server.identity[:16]}, token {'wanted' if token else 'not wanted'}")
        print(f"serving on {scheme}://{shown_host}:{server.port}", flush=True)
        _watch(server, stopping)
    finally:
        server.end()
    print(f"ended; {server.served} batches served", flush=True)
    return 0


def _watch(server: Any, stopping: threading.Event) -> None:
    """Prints a line about served, failed and waiting batches when numbers have changed or batches are waiting."""
    served, sent_bytes, failed, then = 0, 0, 0, time.monotonic()
    while not stopping.wait(NEWS):
        now, health = time.monotonic(), server.health()
        if (health["served"], health["failed"]) != (served, failed) or health["waiting"]:
            rate = (health["served"] - served) / (now - then)
            speed = (health["sent_bytes"] - sent_bytes) / (now - then) / 1e6
            print(
                f"served {health['served']} batches ({rate:.1f}/s, {speed:.1f} MB/s), {health['waiting']} waiting, "
                f"{health['failed']} failed",
                flush=True,
            )
        served, sent_bytes, failed, then = health["served"], health["sent_bytes"], health["failed"], now


if __name__ == "__main__":
    run_plain(main)
