"""``bench gpu``: its flags, and a row for each section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmjax.bench.gpu.driver import RESULTS, Driver
from mmjax.bench.gpu.sections import SECTIONS
from mmjax.bench.rows import Row, at_least
from mmjax.configurable import ConfigError, suggest


def bench_gpu(rounds: int, *, out: str, only: str, small: bool, seconds: int, keep: bool) -> Iterator[Row]:
    """Runs the sections, and yields a row for each: 1 if its checks passed, else 0.

    Args:
      rounds: not used.
      out: folder for the results.
      only: names of sections, with commas between them; all where it is empty.
      small: whether shapes are small enough for a CPU.
      seconds: the longest time of all sections together.
      keep: whether instead the results that are kept in the package are computed again, on this CPU.

    Raises:
      ConfigError: a section is unknown, or there is no accelerator and shapes are not small.
    """
    sections = {section.name: section for section in SECTIONS}
    names = [name for name in only.split(",") if name]
    if unknown := [name for name in names if name not in sections]:
        raise ConfigError(f"--only={only}: there is no section {unknown[0]!r}; {suggest(unknown[0], sections)}")
    if seconds < 1:
        raise ConfigError(f"--seconds={seconds}: must be at least 1, such as 540")
    if keep:
        yield Row(bench="gpu", case=f"kept results: {_keep()}", value=1.0, unit="file")
        return
    driver = Driver(Path(out), small=small, seconds=float(seconds))
    for name, findings in driver.run([section for section in SECTIONS if not names or section.name in names]):
        yield _row(name, findings)
    yield Row(bench="gpu", case=f"everything: see {Path(out) / RESULTS}", value=driver.elapsed, unit="s")


def _keep() -> Path:
    """Computes the kept results on the CPU, and replaces their file."""
    from mmjax import jax_compat
    from mmjax.bench.gpu import digits, parity
    from mmjax.bench.gpu.job import write_json
    from mmjax.bench.gpu.kept import KEPT

    jax_compat.compile_cheaply()  # the dense reference is compiled for every length of a sample
    write_json(KEPT, {"parity": parity.expected(), "digits": digits.expected()}, digits=7)
    return KEPT


def _row(name: str, findings: Mapping[str, Any]) -> Row:
    """A row with 1 for a section whose checks passed, else 0. A section that was left out has no target."""
    failed_checks = [check for check, passed in findings.get("checks", {}).items() if not passed]
    reason = findings.get("error") or ", ".join(failed_checks or findings.get("missing", ()))
    case = f"{name}: {findings['status']} in {findings.get('seconds', 0.0):.0f} s" + (f": {reason}" if reason else "")
    left_out = findings["status"] == "left out"
    target = None if left_out else at_least(1.0)
    return Row(bench="gpu", case=case, value=float(findings["status"] == "ok"), unit="right", target=target)
