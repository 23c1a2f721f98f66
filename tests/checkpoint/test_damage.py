"""Damaged checkpoints: whatever happens to any file, the values are right or the checkpoint is skipped by name."""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_checkpointer import assert_bitwise, put, targets, values

from mmjax.checkpoint import Checkpointer, CheckpointError, TornCheckpointError


def arrays(step: int) -> dict[str, np.ndarray]:
    """Small leaves, which OCDBT stores within its nodes, and one that it stores apart and without a checksum."""
    large = np.random.default_rng(step).normal(size=(64, 64)).astype(np.float32)
    return {**values(step), "params/llm/large": large}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 and 2; each test leaves them as they were."""
    folder = tmp_path_factory.mktemp("damage")
    with Checkpointer(folder, report=pytest.fail) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, put(arrays(step)))
    return folder


def damages(content: bytes, flips: int, seed: int) -> Iterator[tuple[str, bytes | None]]:
    """Yields damaged versions of a file: gone (None), cut, and with one bit flipped at each of `flips` places."""
    yield "gone", None
    for keep in sorted({0, len(content) // 2, max(0, len(content) - 1)} - {len(content)}):
        yield f"cut after {keep}", content[:keep]
    rng = random.Random(seed)
    count = min(flips, len(content))
    for index in range(count):
        at = rng.randrange(index * len(content) // count, (index + 1) * len(content) // count)
        changed = bytearray(content)
        changed[at] ^= 1 << rng.randrange(8)
        yield f"byte {at} changed", bytes(changed)


@pytest.mark.parametrize("flips", [pytest.param(2, marks=pytest.mark.long), pytest.param(40, marks=pytest.mark.slow)])
def test_any_damage_to_any_file(saved: Path, flips: int, capfd: pytest.CaptureFixture[str]) -> None:
    wanted, bad = targets(arrays(0), "eight"), saved / "00000002"
    files = sorted(path for path in bad.rglob("*") if path.is_file())
    assert len(files) >= 9
    outcomes: Counter[tuple[str, int]] = Counter()
    for number, path in enumerate(files):
        content = path.read_bytes()
        for damage, damaged in damages(content, flips, seed=number):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            messages: list[str] = []
            try:
                restored = Checkpointer(saved, report=messages.append).restore_latest(wanted)
            finally:
                path.write_bytes(content)
            about = f"{path.relative_to(bad)}: {damage}"
            assert restored is not None, about
            assert_bitwise(restored.leaves, arrays(restored.step))
            if restored.step == 2:
                assert messages == [], about
            else:
                assert len(messages) == 1 and "\n" not in messages[0], about
                assert str(bad) in messages[0] and str(saved / "00000001") in messages[0], about
            outcomes[str(path.relative_to(bad)).split("/d/")[0], restored.step] += 1
    skipped = {name for name, step in outcomes if step == 1}
    assert {"mmjax/data.json", "state/_METADATA", "state/manifest.ocdbt", "state/ocdbt.process_0"} <= skipped
    assert outcomes["mmjax/data.json", 2] == 0
    assert capfd.readouterr().err == "", "Orbax's stack traces reach the terminal"


def test_a_bit_of_a_leaf(saved: Path) -> None:
    """OCDBT itself does not notice: a leaf of more than a kilobyte lies in a data file as it is."""
    content = arrays(2)["params/llm/large"][:, :32].tobytes()  # its first shard
    path = next(p for p in (saved / "00000002").rglob("*") if p.is_file() and content in p.read_bytes())
    original = path.read_bytes()
    changed = bytearray(original)
    changed[original.index(content) + 1000] ^= 1
    path.write_bytes(bytes(changed))
    try:
        with pytest.raises(TornCheckpointError) as caught:
            Checkpointer(saved).restore(2, targets(arrays(2), "one"))
        parameters = {name: a for name, a in arrays(2).items() if name.startswith("adam_")}
        others = Checkpointer(saved).restore(2, targets(parameters), prefix="adam_")
    finally:
        path.write_bytes(original)
    message = f"{saved / '00000002'} is damaged: the bytes of params/llm/large are not those that were saved"
    assert str(caught.value) == message
    assert_bitwise(others, parameters)  # nobody has asked for the damaged one


@pytest.mark.parametrize("layout", ["two", "eight", "one"])
def test_a_checksum_is_of_the_logical_bytes(tmp_path: Path, layout: str) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, put(arrays(1), layout))
        checkpointer.wait()
        stored = checkpointer.metadata(1).leaves
    assert {name: leaf.crc32 for name, leaf in stored.items()} == {
        name: zlib.crc32(array.tobytes()) for name, array in arrays(1).items()
    }


def test_values_that_change_after_the_call_have_the_checksum_of_before(tmp_path: Path) -> None:
    """Checksums are made later, from bytes that are held since the call."""
    leaves = put(arrays(1))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, leaves)
        for leaf in leaves.values():
            leaf.delete()
        leaves = put(arrays(3))
        checkpointer.wait()
        assert_bitwise(checkpointer.restore(1, targets(arrays(1))), arrays(1))


# ---- other versions


def rewrite(folder: Path, **changes: object) -> None:
    """Changes the stored metadata of step 2; `None` takes a key away."""
    path = folder / "00000002" / "mmjax" / "data.json"
    body = {**json.loads(path.read_text()), **changes}
    body = {name: value for name, value in body.items() if value is not None}
    path.write_text(json.dumps(body))


def test_one_without_checksums_still_restores(tmp_path: Path) -> None:
    """As format 1 was: written by Orbax's own handler, and no leaf has a checksum."""
    with Checkpointer(tmp_path, report=pytest.fail) as checkpointer:
        checkpointer.save(2, put(arrays(2)))
        checkpointer.wait()
        leaves = checkpointer.metadata(2).leaves
        plain = {name: {"shape": list(leaf.shape), "dtype": leaf.dtype} for name, leaf in leaves.items()}
        rewrite(tmp_path, format=1, crc32=None, leaves=plain)
        about = tmp_path / "00000002" / "_CHECKPOINT_METADATA"
        handlers = json.loads(about.read_text())
        json_handler = "orbax.checkpoint.experimental.v1._src.handlers.json_handler.JsonHandler"
        handlers["item_handlers"]["mmjax"] = json_handler
        about.write_text(json.dumps(handlers))
        restored = checkpointer.restore_latest(targets(arrays(2), "eight"))
    assert restored is not None and restored.step == 2
    assert_bitwise(restored.leaves, arrays(2))
    assert {leaf.crc32 for leaf in restored.metadata.leaves.values()} == {None}


def test_metadata_that_lost_its_checksum_is_damaged(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, put(arrays(2)))
        checkpointer.wait()
        rewrite(tmp_path, crc32=None)
        with pytest.raises(TornCheckpointError, match="the metadata has no checksum"):
            checkpointer.metadata(2)
        rewrite(tmp_path, crc32=1)
        with pytest.raises(TornCheckpointError, match="not have the checksum it was saved with"):
            checkpointer.metadata(2)


def test_one_of_a_newer_version_is_not_skipped(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, report=pytest.fail) as checkpointer:
        checkpointer.save(2, put(arrays(2)))
        checkpointer.wait()
        body = json.loads((tmp_path / "00000002" / "mmjax" / "data.json").read_text()) | {"format": 5}
        body.pop("crc32")
        rewrite(tmp_path, format=5, crc32=zlib.crc32(json.dumps(body, sort_keys=True).encode()))
        with pytest.raises(CheckpointError, match=r"00000002: checkpoint format 5, this version reads 4: update mmjax"):
            checkpointer.restore_latest(targets(arrays(2)))
