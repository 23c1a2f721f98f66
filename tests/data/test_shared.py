"""Batches of workers in shared memory: nothing of it is left behind, and there is a way without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from grain.multiprocessing import SharedMemoryArray
from test_loader import assert_equal, collect, loader

from mmjax.data import loader as loaders
from mmjax.data.shared import put_together, spread_out

SHM = Path("/dev/shm")
RUN = """
import os, sys
sys.path.insert(0, {tests!r})
from test_loader import loader
if __name__ == "__main__":
    stream = loader(workers=2, steps=50)
    batches = [next(stream) for _ in range(3)]
    print(type(batches[0].microbatches[0].inputs["llm"]["tokens"].base).__name__)
    if {close}:
        stream.close()
"""


def names() -> set[str]:
    return {path.name for path in SHM.glob("psm_*")}


def test_a_batch_is_the_same_after_it() -> None:
    batches = collect(loader(steps=2))
    again = [put_together(spread_out(batch)) for batch in batches]
    assert_equal(again, batches)
    assert [batch.figures for batch in again] == [batch.figures for batch in batches]
    assert [batch.broken for batch in again] == [batch.broken for batch in batches]


@pytest.mark.long
@pytest.mark.skipif(not SHM.is_dir(), reason="looks shared memory up in /dev/shm")
@pytest.mark.parametrize("close", [True, False])
def test_nothing_is_left_of_it_when_the_process_ends(close: bool, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN.format(tests=str(Path(__file__).parent), close=close))
    before = names()
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.strip() == "SharedMemoryArray"
    if close:
        assert "leaked" not in ended.stderr
    assert not names() - before


def test_without_room_arrays_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(loaders, "has_room", lambda size: bool(sizes.append(size)))
    stream = loader(workers=1, steps=2)
    got = collect(stream)
    tokens = got[0].microbatches[0].inputs["llm"]["tokens"]
    assert not isinstance(tokens.base, SharedMemoryArray)
    assert_equal(got, collect(loader(steps=2)))
    bytes_of_arrays = sum(
        x.nbytes for part in got[0].microbatches for arrays in part.inputs.values() for x in arrays.values()
    )
    assert sizes[0] >= 4 * bytes_of_arrays
