"""Sets up the devices, threads and compilation cache that all tests share, before JAX is imported.

Tests run on eight virtual CPU devices; `JAX_PLATFORMS=cuda pytest -m gpu` runs those that want an accelerator.
Processes that a test starts inherit all of it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import zlib
from importlib.metadata import version
from pathlib import Path

import pytest

DEVICES = 8
CACHE_BYTES = 2 << 30


def _cache_directory() -> Path:
    """Apart from the cache of training runs: these programs are compiled with less optimization."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "mmjax" / "compiled-tests"


def _prune(directory: Path, limit: int) -> None:
    """Removes the oldest entries beyond `limit` bytes. JAX's own limit walks the directory at every write."""
    sizes = {path: path.stat() for path in directory.glob("*-cache")}
    total = sum(stat.st_size for stat in sizes.values())
    for path in sorted(sizes, key=lambda path: sizes[path].st_mtime):
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= sizes[path].st_size


def _set_up() -> None:
    if "jax" in sys.modules:
        raise RuntimeError("jax was imported before tests/conftest.py could set its devices and threads")
    os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES)
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_optimization_level" not in flags:
        # Compilation is most of the tests' time, and this takes more than half of it off; arithmetic stays IEEE fp32.
        # It is `jax_compat.compile_cheaply`; the package is not imported here, since mutants are tested by processes
        # that have this module already.
        flags += " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        if version("jaxlib").startswith("0.10."):
            flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = flags.strip()
    # XLA:CPU's pool starves when several multi-device programs are queued; four threads a device are enough.
    os.environ["NPROC"] = str(max(4 * DEVICES, int(os.environ.get("NPROC") or 0)))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache_directory()))
    # Tiny programs too: thousands of them add up.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    os.environ.setdefault("MPLBACKEND", "agg")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        # A shell that starts the tests in the background ignores Ctrl-C for them, and for the runs that they interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)


_set_up()
if "PYTEST_XDIST_WORKER" not in os.environ:
    _prune(_cache_directory(), CACHE_BYTES)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part=1/8`: every eighth of the tests that are left in a file; all parts are all tests."""
    parser.addoption("--part", default="0/1", metavar="K/N", help="every N-th test of each file, part K from 0 on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of the part that `--part` names; `-m` has left out others before."""
    part, parts = map(int, str(config.getoption("--part")).split("/"))
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    kept = set[int]()
    for path, tests in by_file.items():
        first = (part + zlib.crc32(path.name.encode())) % parts  # files of a single test are divided, too
        kept |= {id(item) for item in tests[first::parts]}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps imported modules and 7,000 tests out of garbage collections, which tracing causes all the time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that are marked `gpu` are skipped without one, and `compiled` ones without a compiler for CUDA."""
    from mmjax.compile.targets import has_compiler

    if item.get_closest_marker("compiled") and not has_compiler():
        pytest.skip("jax has no compiler for CUDA here")
    if item.get_closest_marker("gpu"):
        import jax

        if jax.default_backend() == "cpu":
            pytest.skip("needs an accelerator")


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished, undisturbed run of the tiny configuration (see `trial_runs.py`); read only."""
    from trial_runs import train_flags, write_tiny

    from mmjax.train.__main__ import main

    folder = tmp_path_factory.mktemp("tiny")
    assert main(train_flags(write_tiny(folder), folder / "run")) == 0
    return folder / "run"
