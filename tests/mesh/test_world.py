"""The world: devices in order, settings before the backend starts, and clear refusals where it started without them.

What happens at the backend's start needs a fresh process: `run_python` starts one without the tests' settings.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax import lax

from mmjax import jax_compat
from mmjax.configurable import ConfigError
from mmjax.mesh import world as world_module
from mmjax.mesh.config import WorldConfig
from mmjax.mesh.layout import Layout
from mmjax.mesh.world import THREADS_PER_DEVICE, World, default_cache_directory

OURS = ("NPROC", "XLA_FLAGS", "JAX_")


def run_python(script: str, environment: dict[str, str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs `script` in a process in which nothing about JAX is set but `environment`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=clean | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def printed(script: str, **environment: str) -> list[str]:
    done = run_python(script, environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# ---- in this process, whose backend has eight devices ----------------------------------------------------------------


def test_ranks_are_devices_in_their_fixed_order():
    world = World.create(WorldConfig(), [Layout(tp=2, pp=2), Layout(dp=3, rank_offset=4)])
    assert world.size == 7
    assert world.devices == tuple(jax.devices()[:7])
    assert world.mesh.devices.tolist() == list(world.devices)
    assert world.platform == jax.default_backend()


def test_more_devices_than_the_layouts_use_may_be_asked_for():
    assert World.create(WorldConfig(devices=8), [Layout(dp=2)]).size == 8


def test_fewer_devices_than_the_layouts_use_are_refused():
    with pytest.raises(ConfigError, match=r"^World\.devices=4: the layouts use ranks 0-5; set it to 6 or 0$"):
        World.create(WorldConfig(devices=4), [Layout(dp=2), Layout(dp=2, rank_offset=4)])


def test_a_cpu_that_was_started_too_small_is_refused_before_smaller_layouts_are_proposed():
    def propose(found: int) -> None:
        raise AssertionError(f"asked for another configuration for {found} devices")

    message = (
        r"^World\.devices=16: JAX was already started with 8 CPU device\(s\); "
        r"restart Python and build the World, or set jax_num_cpu_devices=16, before using JAX$"
    )
    with pytest.raises(ConfigError, match=message):
        World.create(WorldConfig(), [Layout(dp=16)], propose)


def accelerators(monkeypatch, count: int) -> None:
    """Presents the virtual devices as accelerators of which there are `count`."""

    class Accelerator:
        platform, device_kind = "gpu", "Accelerator X"

    monkeypatch.setattr(world_module, "_devices", lambda config: [Accelerator()] * count)


def test_too_few_accelerators_are_named(monkeypatch):
    accelerators(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"^World\.devices=4: only 2 Accelerator X device\(s\) here; use .*[^\n]$"):
        World.create(WorldConfig(), [Layout(dp=4)])


def test_a_caller_may_word_the_refusal_of_too_few_accelerators(monkeypatch):
    def refuse(found: int) -> None:
        raise ConfigError(f"only {found}")

    accelerators(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"^only 2$"):
        World.create(WorldConfig(), [Layout(dp=4)], refuse)


@pytest.mark.parametrize("threads", ["", "31", "many"])
def test_a_pool_that_was_started_too_small_is_refused(monkeypatch, threads):
    monkeypatch.setenv("NPROC", threads)
    message = (
        r"^World\.devices=8: JAX started before mmjax with too small a thread pool, which can deadlock; "
        r"start Python with NPROC=32 in the environment or build the World before using JAX$"
    )
    with pytest.raises(ConfigError, match=message):
        World.create(WorldConfig(), [Layout(dp=8)])
    assert World.create(WorldConfig(), [Layout()]).size == 1, "one device waits for nobody"


def test_a_pool_of_four_threads_a_device_is_enough(monkeypatch):
    monkeypatch.setenv("NPROC", "12")
    assert World.create(WorldConfig(), [Layout(dp=3)]).size == 3
    assert THREADS_PER_DEVICE == 4


def test_the_warm_up_reaches_every_device(monkeypatch):
    world, reached = World(jax.devices()), []
    compiled = jax.jit

    def jit(fn):
        def run(x):
            reached.extend(shard.device for shard in x.addressable_shards)
            return compiled(fn)(x)

        return run

    monkeypatch.setattr(world_module.jax, "jit", jit)
    world.warm_up()
    assert reached == list(world.devices)


def test_a_warm_up_that_sums_wrongly_is_an_error(monkeypatch):
    psum = lax.psum
    monkeypatch.setattr(world_module.lax, "psum", lambda x, axes: psum(x, axes) * 2)
    with pytest.raises(RuntimeError, match=r"^warm-up collective over 8 devices gave \[56\.\], expected 28\.0$"):
        World(jax.devices()).warm_up()


def test_values_of_the_configuration_are_checked():
    with pytest.raises(ConfigError, match=r"^World\.devices=-1: must not be negative; set it to 0 for what"):
        WorldConfig(devices=-1)
    with pytest.raises(ConfigError, match=r"^World\.platform='gpu': did you mean 'cuda'\? legal: "):
        WorldConfig(platform="gpu")
    with pytest.raises(ConfigError, match=r"^World\.transport='colective': did you mean 'collective'\?"):
        WorldConfig(transport="colective")
    with pytest.raises(ConfigError, match=r"^World\.route='slice': did you mean 'sliced'\? legal: 'leader', 'sliced'$"):
        WorldConfig(route="slice")


def test_the_cache_is_in_the_user_s_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "mmjax" / "xla"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_cache_directory() == Path.home() / ".cache" / "mmjax" / "xla"


# ---- at the backend's start ------------------------------------------------------------------------------------------

CREATE = """
import os, jax
from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout
from mmjax.mesh.world import World
from mmjax.mesh.config import WorldConfig

def create(dp, **values):
    try:
        world = World.create(WorldConfig(**values), [Layout(dp=dp)])
        print(world.size, len(jax.devices()), os.environ["NPROC"])
    except ConfigError as error:
        print(error)
"""


@pytest.mark.long
def test_a_fresh_process_gets_virtual_devices_threads_and_a_cache(tmp_path):
    lines = printed(CREATE + "create(3)\nprint(jax.config.jax_compilation_cache_dir)", XDG_CACHE_HOME=str(tmp_path))
    assert lines == ["3 3 12", str(tmp_path / "mmjax" / "xla")]
    assert list((tmp_path / "mmjax" / "xla").glob("*-cache")), "the warm-up program was not kept"


def test_larger_settings_of_the_environment_are_kept(tmp_path):
    script = "create(2, compilation_cache='none')\nprint(jax.config.jax_enable_compilation_cache)"
    settings = {"NPROC": "40", "JAX_NUM_CPU_DEVICES": "6", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    assert printed(CREATE + script, **settings) == ["2 6 40", "False"]
    assert not list(tmp_path.iterdir())


def test_a_cache_that_is_named_wins_over_the_environment(tmp_path):
    script = f"create(1, compilation_cache='{tmp_path / 'mine'}')\nprint(jax.config.jax_compilation_cache_dir)"
    lines = printed(CREATE + script, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"))
    assert lines == ["1 1 4", str(tmp_path / "mine")]


def test_a_backend_that_somebody_else_started_is_refused():
    lines = printed(
        CREATE
        + "jax.config.update('jax_num_cpu_devices', 2); jax.devices()\n"
        + "create(3, compilation_cache='none')\ncreate(2)\ncreate(1)\ncreate(2, platform='cuda')",
        NPROC="3",
    )
    assert lines == [
        "World.devices=3: JAX was already started with 2 CPU device(s); restart Python and build the World, "
        "or set jax_num_cpu_devices=3, before using JAX",
        "World.devices=2: JAX started before mmjax with too small a thread pool, which can deadlock; "
        "start Python with NPROC=8 in the environment or build the World before using JAX",
        "1 2 3",
        "World.platform='cuda': Unknown backend cuda. Available backends are ['cpu']; use 'cpu' for virtual devices",
    ]


def test_a_platform_that_is_not_here_is_refused():
    (line,) = printed(CREATE + "create(1, platform='tpu')", JAX_PLATFORMS="")
    assert line.startswith("World.platform='tpu': ") and line.endswith("; use 'cpu' for virtual devices")


DETERMINISTIC = (
    CREATE
    + """
def deterministic(platform):
    try:
        World.create(WorldConfig(platform=platform, compilation_cache='none'), [Layout()], deterministic=True)
    except ConfigError as error:
        print(error)
    print(os.environ.get("XLA_FLAGS"))
"""
)
FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
MERGER = "--xla_gpu_dot_merger_threshold_mb=0"


@pytest.mark.long
def test_the_settings_of_gpus_precede_the_backend_where_it_may_be_a_gpu():
    """XLA ends a process that starts with a flag that it does not know: all are known here."""
    known = "; jax.config.update('jax_platforms', 'cpu'); jax.jit(abs)(1.0)"
    refusal, flags = printed(DETERMINISTIC + f"deterministic('cuda'){known}")
    assert refusal.startswith("World.platform='cuda': ") and flags == f"{FLAGS} {MERGER}"
    share = "; print(os.environ.get('XLA_CLIENT_MEM_FRACTION'))"
    *_, flags, fraction = printed(CREATE + "create(1, platform='cuda'); print(os.environ['XLA_FLAGS'])" + share)
    both = f"--xla_gpu_enable_triton_gemm=false {MERGER}"
    assert (flags, fraction) == (both, "0.92")
    assert printed(CREATE + "create(1)" + share)[1:] == ["None"], "a CPU"


@pytest.mark.long
def test_a_cpu_is_deterministic_without_flags():
    assert printed(DETERMINISTIC + "deterministic('cpu')") == ["None"]
    assert printed(DETERMINISTIC + "jax.devices(); deterministic('')", NPROC="4") == ["None"]


@pytest.fixture
def started_gpu(monkeypatch):
    """A GPU that JAX has started: its devices are stand-ins, what is tested is the question."""
    monkeypatch.setattr(world_module, "_devices", lambda config: [jax_compat.PlannedDevice(0, platform="gpu")])
    monkeypatch.setattr(World, "warm_up", lambda self: None)
    for name in ("XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


def test_a_gpu_that_was_started_without_the_flags_is_refused(monkeypatch, started_gpu, caplog):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")
    refused = (
        r"^Train\.deterministic=True: JAX started before mmjax and without --xla_gpu_deterministic_ops=true; start"
    )
    with pytest.raises(ConfigError, match=refused):
        World.create(WorldConfig(), [Layout()], deterministic=True)
    monkeypatch.setenv("XLA_FLAGS", f"{FLAGS} {MERGER}")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    assert World.create(WorldConfig(), [Layout()], deterministic=True).platform == "gpu"
    assert not caplog.records
    monkeypatch.setenv("XLA_FLAGS", f"{FLAGS} --xla_gpu_deterministic_ops=false")
    with pytest.raises(ConfigError, match=refused):
        World.create(WorldConfig(), [Layout()], deterministic=True)


def test_a_gpu_that_was_started_without_the_settings_is_warned_of(started_gpu, caplog):
    World.create(WorldConfig(), [Layout()])
    assert [record.message for record in caplog.records] == [
        "JAX started the GPU before mmjax: sums of gradients take memory passes and a quarter of the memory stays "
        "unused; start Python with XLA_FLAGS='--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0' "
        "XLA_CLIENT_MEM_FRACTION='0.92' or build the World before using JAX"
    ]
    assert "XLA_FLAGS" not in os.environ


# ---- the thread pool -------------------------------------------------------------------------------------------------

MIX = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

{start}
devices, rows = np.array(jax.devices()), PartitionSpec("u")

def compute(x):
    for _ in range(4):
        x = lax.pcast(lax.pmean(jnp.tanh(x @ x.T) @ x, "u"), "u", to="varying") + 0 * x
    return x

def shift(x):
    size = lax.axis_size("u")
    return lax.ppermute(x, "u", [(i, (i + size // 2) % size) for i in range(size)])

def program(body, ranks):
    mesh = Mesh(devices[list(ranks)], ("u",))
    x = jax.device_put(np.full((64 * len(ranks), 256), 0.01, np.float32), NamedSharding(mesh, rows))
    fn = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=rows, out_specs=rows))
    jax.block_until_ready(fn(x))
    return lambda: fn(x)

first, second, encoder = program(compute, (0, 1)), program(compute, (2, 3)), program(compute, (4, 5, 6, 7))
hand_over, boundary = program(shift, (0, 1, 2, 3)), program(shift, (0, 1, 4, 5, 6, 7))
norm = program(compute, range(8))
down = [encoder, boundary, first, hand_over, second]
recent = []
for step in range(4):
    for run in (down + down[::-1]) * 8 + [norm]:
        recent = recent[-50:] + [run()]
jax.block_until_ready(recent)
print("passed")
"""
"""What an encoder on four ranks and two LLM stages of two dispatch: programs of 2, 4, 6 and 8 devices, many queued."""


@pytest.mark.long
def test_programs_of_many_sizes_queue_up_without_starving():
    start = "from mmjax import Layout, World, WorldConfig\nWorld.create(WorldConfig(), [Layout(dp=8)])"
    assert printed(MIX.format(start=start)) == ["passed"]


@pytest.mark.slow
@pytest.mark.skipif(
    "MMJAX_TEST_STARVATION" not in os.environ, reason="a race, lost on 2 cores: MMJAX_TEST_STARVATION=1"
)
def test_the_same_mix_starves_in_the_default_pool():
    """Why `World` sets NPROC: a program waits for threads that queued ones hold, until XLA aborts the process.

    Were this to pass, XLA would have learned to queue programs, and the setting could go.
    """
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=15"
    script = MIX.format(start="jax.config.update('jax_num_cpu_devices', 8)")
    done = run_python(script, {"XLA_FLAGS": patience}, timeout=240)
    assert done.returncode < 0
    assert "threads to join the rendezvous" in done.stderr
