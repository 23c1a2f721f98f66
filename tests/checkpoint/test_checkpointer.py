"""Checkpoints: values under other layouts, atomicity under SIGKILL, torn directories, a full disk."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from mmjax.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, TornCheckpointError, export
from mmjax.configurable import ConfigError

ROOT = Path(__file__).parents[2]


def values(seed: int = 0) -> dict[str, np.ndarray]:
    """Leaves of several shapes and dtypes, all elements different."""
    random = np.random.default_rng(seed)
    return {
        "params/llm/embed": random.normal(size=(16, 8)).astype(np.float32),
        "params/llm/layers/000/attn/q": random.normal(size=(8, 8)).astype(np.float32),
        "params/llm/layers/001/attn/q": random.normal(size=(8, 8)).astype(np.float32),
        "params/llm/norm": random.normal(size=(7,)).astype(jnp.bfloat16),
        "params/vision/patch/bias": random.normal(size=(8,)).astype(np.float32),
        "adam_m/vision/patch/bias": random.normal(size=(8,)).astype(np.float32),
        "adam_v/vision/count": np.asarray(seed + 41, np.int32),
    }


def mesh(first: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    count = int(np.prod(shape))
    return Mesh(np.asarray(jax.devices()[first : first + count]).reshape(shape), names)


def placed(arrays: dict[str, np.ndarray], layout: str) -> dict[str, NamedSharding]:
    """Shardings on two submeshes ("two": llm on ranks 0-3, vision on 4-7), one of 8 ("eight"), or one rank ("one")."""
    if layout == "one":
        single = NamedSharding(mesh(5, (1,), ("x",)), P())
        return dict.fromkeys(arrays, single)
    if layout == "eight":
        everyone = mesh(0, (4, 2), ("dp", "tp"))
        specs = {2: P("tp", "dp"), 1: P(), 0: P()}
        return {name: NamedSharding(everyone, specs[a.ndim]) for name, a in arrays.items()}
    llm, vision = mesh(0, (2, 2), ("dp", "tp")), mesh(4, (4,), ("dp",))
    specs = {2: P(None, "tp"), 1: P(), 0: P()}
    return {
        name: NamedSharding(llm, specs[a.ndim]) if "llm" in name else NamedSharding(vision, P("dp") if a.ndim else P())
        for name, a in arrays.items()
    }


def put(arrays: dict[str, np.ndarray], layout: str = "two") -> dict[str, jax.Array]:
    shardings = placed(arrays, layout)
    return {name: jax.device_put(a, shardings[name]) for name, a in arrays.items()}


def targets(arrays: dict[str, np.ndarray], layout: str = "two") -> dict[str, jax.ShapeDtypeStruct]:
    shardings = placed(arrays, layout)
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=shardings[name]) for name, a in arrays.items()}


def assert_bitwise(leaves: dict[str, jax.Array], arrays: dict[str, np.ndarray]) -> None:
    assert leaves.keys() == arrays.keys()
    for name, array in arrays.items():
        assert leaves[name].dtype == array.dtype, name
        assert np.asarray(leaves[name]).tobytes() == array.tobytes(), name


def save(directory: Path, *steps: int, keep: int = 9, report=pytest.fail) -> None:
    with Checkpointer(directory, CheckpointConfig(keep=keep), report=report) as checkpointer:
        for step in steps:
            checkpointer.save(step, put(values(step)))


def largest_file(directory: Path) -> Path:
    return max((p for p in (directory / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("layout", ["two", "eight", "one"])
def test_any_layout_restores_bitwise_into_its_own_shardings(tmp_path, layout):
    save(tmp_path, 3)
    with Checkpointer(tmp_path) as checkpointer:
        leaves = checkpointer.restore(3, targets(values(), layout))
    assert_bitwise(leaves, values(3))
    for name, sharding in placed(values(), layout).items():
        assert leaves[name].sharding == sharding, name


def test_metadata_names_every_leaf_and_keeps_the_callers_values(tmp_path):
    config = 'Train.steps = 7\nvision/Layout.tp = 2  # "µ"\n'
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(12, put(values()), seed=2**40, config=config, extra={"skipped": [3, 5]})
        checkpointer.wait()
        metadata = checkpointer.metadata(12)
    assert (metadata.step, metadata.seed, metadata.config) == (12, 2**40, config)
    assert metadata.extra == {"skipped": [3, 5]}
    assert metadata.versions["jax"] == jax.__version__
    shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in metadata.leaves.items()}
    assert shapes == {name: (a.shape, str(a.dtype)) for name, a in values().items()}


def test_a_prefix_restores_the_parameters_and_leaves_the_moments(tmp_path):
    save(tmp_path, 1)
    parameters = {name: a for name, a in values(1).items() if name.startswith("params/")}
    with Checkpointer(tmp_path) as checkpointer:
        assert_bitwise(checkpointer.restore(1, targets(parameters, "one"), prefix="params/"), parameters)


@pytest.mark.parametrize("end", ["donate", "delete"])
def test_a_save_keeps_the_values_of_the_moment_of_the_call(tmp_path, end):
    # 32 MiB in one file: the write is still running when the next update has overwritten what it may.
    sharding = NamedSharding(mesh(0, (2, 2), ("dp", "tp")), P(None, "tp"))
    update = jax.jit(lambda x: x * 1.5 + 1.0, donate_argnums=0)
    array = np.random.default_rng(0).normal(size=(2048, 4096)).astype(np.float32)
    update(jax.device_put(array, sharding)).block_until_ready()
    leaf = jax.device_put(array, sharding) + 0.0
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"params/w": leaf})
        assert threading.active_count() > 1 and not (tmp_path / "00000001").exists(), "the save was not asynchronous"
        if end == "donate":
            for _ in range(3):
                leaf = update(leaf)
        else:
            leaf.delete()
            leaf = jax.device_put(array * 0 - 1, sharding) + 0.0
        leaf.block_until_ready()
        checkpointer.wait()
        target = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        assert_bitwise(checkpointer.restore(1, {"params/w": target}), {"params/w": array})


def test_keep_deletes_the_oldest_and_nothing_else(tmp_path):
    (tmp_path / "notes").mkdir()
    save(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000004", "00000005", "notes"]
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [4, 5] and checkpointer.latest_step() == 5


def test_keep_never_deletes_the_checkpoint_just_written(tmp_path):
    save(tmp_path, 10, 20)
    save(tmp_path, 5, keep=1)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [5]


def test_an_empty_or_absent_directory_is_a_fresh_run(tmp_path):
    checkpointer = Checkpointer(tmp_path / "absent", report=pytest.fail)
    assert checkpointer.latest_step() is None and checkpointer.steps() == []
    assert checkpointer.restore_latest(targets(values())) is None
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("damage", ["leaf data", "leaf data gone", "manifest", "metadata", "foreign"])
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, damage):
    save(tmp_path, 1, 2)
    bad = tmp_path / "00000002"
    if damage == "leaf data":
        os.truncate(largest_file(bad), largest_file(bad).stat().st_size // 2)
    elif damage == "leaf data gone":
        largest_file(bad).unlink()
    elif damage == "manifest":
        os.truncate(bad / "state" / "manifest.ocdbt", 10)
    elif damage == "metadata":
        for path in (bad / "mmjax").iterdir():
            os.truncate(path, 30)
    else:
        bad = tmp_path / "00000123"
        bad.mkdir()
        (bad / "weights.bin").write_bytes(b"somebody else's")
    messages: list[str] = []
    with Checkpointer(tmp_path, report=messages.append) as checkpointer:
        restored = checkpointer.restore_latest(targets(values(), "eight"))
        assert restored is not None
        expected = 2 if damage == "foreign" else 1
        assert restored.step == restored.metadata.step == expected
        assert_bitwise(restored.leaves, values(expected))
        assert len(messages) == 1 and "\n" not in messages[0]
        assert str(bad) in messages[0] and str(tmp_path / f"{expected:08d}") in messages[0]
        # The step is reached again and takes the torn one's place.
        checkpointer.save(int(bad.name), put(values(77)))
        checkpointer.wait()
        assert_bitwise(checkpointer.restore(int(bad.name), targets(values())), values(77))
    assert {path.name for path in tmp_path.iterdir()} == {"00000001", "00000002", bad.name}


def test_nothing_readable_is_an_error_and_not_a_fresh_run(tmp_path):
    save(tmp_path, 1)
    largest_file(tmp_path / "00000001").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read.*00000001") as caught:
        Checkpointer(tmp_path).restore_latest(targets(values()))
    assert "\n" not in str(caught.value)


def test_leaves_that_do_not_fit_are_all_named_in_one_line(tmp_path):
    save(tmp_path, 1)
    wanted = values()
    wanted["params/llm/layers/002/attn/q"] = np.zeros((8, 8), np.float32)
    del wanted["adam_v/vision/count"]
    wanted["params/llm/embed"] = np.zeros((32, 8), np.float32)
    wanted["params/llm/norm"] = np.zeros(7, np.int32)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path, report=pytest.fail).restore_latest(targets(wanted))
    message = str(caught.value)
    assert not isinstance(caught.value, TornCheckpointError) and "\n" not in message
    assert "missing: params/llm/layers/002/attn/q" in message
    assert "not wanted: adam_v/vision/count" in message
    assert "params/llm/embed is float32[16, 8], wanted float32[32, 8]" in message
    assert "params/llm/norm is bfloat16[7], wanted int32[7]" in message


@pytest.mark.parametrize("layout", ["two", "eight", "one"])
def test_leaves_come_in_the_dtype_that_they_are_stored_in(tmp_path, layout):
    """Wanted in another floating dtype: of a frozen module that is trained now, and the other way round."""
    save(tmp_path, 1)
    wanted = targets(values(), layout)
    for name, dtype in (("llm/norm", jnp.float32), ("llm/embed", jnp.bfloat16), ("vision/patch/bias", jnp.float16)):
        wanted[f"params/{name}"] = wanted[f"params/{name}"].update(dtype=dtype)
    restored = Checkpointer(tmp_path, report=pytest.fail).restore_latest(wanted)
    assert restored
    assert_bitwise(restored.leaves, values(1))
    assert all(leaf.sharding == wanted[name].sharding for name, leaf in restored.leaves.items())


def test_a_target_without_sharding_is_refused(tmp_path):
    save(tmp_path, 1)
    wanted = targets(values())
    wanted["params/llm/norm"] = jax.ShapeDtypeStruct((7,), jnp.bfloat16)
    with pytest.raises(CheckpointError, match="no sharding given for params/llm/norm"):
        Checkpointer(tmp_path).restore(1, wanted)


@pytest.mark.parametrize("names", [["a.b"], ["a//b"], [""], ["a", "a/b"], ["a/b", "a"], ["a/b/c", "a/b"]])
def test_ambiguous_leaf_names_are_refused(tmp_path, names):
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(CheckpointError, match="leaf name"),
    ):
        checkpointer.save(1, {name: jnp.zeros(1) for name in names})
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_saved_once_per_run_and_replaced_by_the_next(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, put(values(1)))
        checkpointer.save(4, put(values(2)))
        checkpointer.wait()
        assert_bitwise(checkpointer.restore(4, targets(values())), values(1))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, put(values(3)))
        checkpointer.wait()
        assert_bitwise(checkpointer.restore(4, targets(values())), values(3))
        assert checkpointer.steps() == [4]


def test_a_full_disk_is_reported_and_the_next_save_succeeds(tmp_path):
    # A limit on the size of files is the full disk that needs no privileges: writes fail half-way.
    messages: list[str] = []
    big = {"params/w": np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(tmp_path, report=messages.append) as checkpointer:
        checkpointer.save(1, put(big, "one"))
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            for step in (1, 2):  # the first would replace a good one
                checkpointer._saved = None
                checkpointer.save(step, put({"params/w": big["params/w"] + step}, "one"))
                checkpointer.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(messages) == 2 and all("was not saved" in m and "\n" not in m for m in messages)
        assert str(tmp_path / "00000002") in messages[1] and checkpointer.failure is not None
        assert [path.name for path in tmp_path.iterdir()] == ["00000001"], "a failed save left its bytes behind"
        assert_bitwise(checkpointer.restore(1, targets(big, "one")), big)
        checkpointer.save(3, put(big, "one"))
        checkpointer.wait()
        assert checkpointer.failure is None and checkpointer.steps() == [1, 3] and len(messages) == 2


def test_a_directory_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    messages: list[str] = []
    with Checkpointer(tmp_path / "file" / "below", report=messages.append) as checkpointer:
        checkpointer.save(1, put(values()))
    assert len(messages) == 1 and "was not saved" in messages[0]


def test_saving_after_close_is_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    with pytest.raises(RuntimeError, match="closed"):
        checkpointer.save(1, put(values()))


def test_leaving_the_context_leaves_no_thread_behind(tmp_path):
    before = set(threading.enumerate())
    save(tmp_path, 1, 2)
    deadline = time.monotonic() + 5
    while (left := [t for t in threading.enumerate() if t not in before and not t.daemon]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert not left


@pytest.mark.long
def test_hundreds_of_tiny_leaves_share_a_few_files(tmp_path):
    arrays = {f"params/llm/layers/{i:03d}/attn_norm": np.full(8, i, np.float32) for i in range(400)}
    leaves = put(arrays, "one")
    with Checkpointer(tmp_path) as checkpointer:
        start = time.monotonic()
        checkpointer.save(1, leaves)
        checkpointer.wait()
        assert time.monotonic() - start < 10  # measured 0.5 s; one file per leaf or a compilation each costs more
        assert_bitwise(checkpointer.restore(1, targets(arrays, "one")), arrays)
    assert sum(path.is_file() for path in tmp_path.rglob("*")) < 40


def test_export_is_a_plain_orbax_checkpoint_of_nested_numpy_arrays(tmp_path):
    parameters = {name.removeprefix("params/"): a for name, a in values().items() if name.startswith("params/")}
    about = {"step": 5, "seed": 0, "config": "", "versions": {}, "extra": {}}
    export(put(parameters), tmp_path / "out", metadata=about)
    tree = ocp.load(tmp_path / "out")
    assert sorted(tree) == ["llm", "vision"] and sorted(tree["llm"]["layers"]) == ["000", "001"]
    for name, array in parameters.items():
        leaf = tree
        for key in name.split("/"):
            leaf = leaf[key]
        assert leaf.dtype == array.dtype and np.asarray(leaf).tobytes() == array.tobytes(), name
    assert ocp.metadata(tmp_path / "out").custom_metadata == about
    with pytest.raises(CheckpointError, match="exists"):
        export(put(parameters), tmp_path / "out", metadata=about)


@pytest.mark.parametrize(("field", "value"), [("every", -1), ("keep", 0)])
def test_config_errors_name_the_field(field, value):
    with pytest.raises(ConfigError, match=rf"Checkpoint\.{field}={value}"):
        CheckpointConfig(**{field: value})


def test_due():
    checkpointer = Checkpointer("unused", CheckpointConfig(every=4))
    assert [step for step in range(13) if checkpointer.due(step)] == [4, 8, 12]
    assert not any(Checkpointer("unused", CheckpointConfig(every=0)).due(step) for step in range(5))


CHILD = """
import os, signal, sys, threading, time
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
from mmjax.checkpoint import Checkpointer
directory, mode = sys.argv[1:]
small = {"params/w": jax.numpy.arange(8, dtype="float32")}
big = {"params/w": jax.device_put(np.full((4096, 4096), 7, "float32"))}
checkpointer = Checkpointer(directory, report=lambda message: print(message, flush=True))
if mode != "forget":
    checkpointer.__enter__()
checkpointer.save(1, small)
checkpointer.wait()
checkpointer.save(2, big)
if mode == "kill":
    while not any(f.stat().st_size for d in os.scandir(directory) if "tmp" in d.name for f in _files(d.path)):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
elif mode == "interrupt":
    try:
        threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            time.sleep(0.001)
    except KeyboardInterrupt:
        checkpointer.close()
        print("interrupted", flush=True)
"""
FILES = """
from pathlib import Path
def _files(folder):
    try:
        return [p for p in Path(folder).rglob("*") if p.is_file()]
    except FileNotFoundError:
        return []
"""


def child(directory: Path, mode: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONWARNINGS="error::ResourceWarning", XLA_FLAGS="")
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FILES + CHILD), str(directory), mode],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_sigkill_in_mid_save_leaves_the_previous_checkpoint_the_latest(tmp_path):
    done = child(tmp_path, "kill")
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2 and left[0] == "00000001" and left[1].startswith("00000002."), "not killed in mid-save"
    array = {"params/w": np.arange(8, dtype=np.float32)}
    with Checkpointer(tmp_path, report=pytest.fail) as checkpointer:
        assert checkpointer.steps() == [1]
        restored = checkpointer.restore_latest(targets(array, "eight"))
        assert restored is not None and restored.step == 1
        assert_bitwise(restored.leaves, array)
        assert len(list(tmp_path.iterdir())) == 2, "reading must not touch another process's unfinished save"
        checkpointer.save(2, put(array, "eight"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001", "00000002"]


@pytest.mark.parametrize("mode", ["interrupt", "forget"])
def test_ctrl_c_or_a_forgotten_close_still_commits_and_exits_cleanly(tmp_path, mode):
    start = time.monotonic()
    done = child(tmp_path, mode)
    assert done.returncode == 0 and done.stderr == "" and time.monotonic() - start < 30, done.stderr
    assert done.stdout == ("interrupted\n" if mode == "interrupt" else "")
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        big = {"params/w": np.full((4096, 4096), 7, np.float32)}
        assert_bitwise(checkpointer.restore(2, targets(big, "one")), big)
