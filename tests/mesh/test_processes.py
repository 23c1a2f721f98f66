"""Boundaries between two real processes: each holds the shards of its own devices alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

PROCESS = """
import math, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
me = int(sys.argv[1])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, me)
import numpy as np
from mmjax.mesh import Boundary, Layout, World

world = World(jax.devices())
world.warm_up()
PAIRS = [  # ranks 0-3 are devices of process 0, 4-7 of process 1
    (Layout(dp=4), Layout(dp=2, tp=2, rank_offset=4)),
    (Layout(dp=2, tp=2), Layout(tp=3, rank_offset=4)),
    (Layout(dp=2), Layout(dp=3, rank_offset=4)),
    (Layout(dp=2, tp=2), Layout(dp=2, cp=2, rank_offset=4)),
    (Layout(dp=2), Layout(tp=2, rank_offset=2)),  # nothing to do for process 1
    (Layout(dp=2, rank_offset=2), Layout(tp=3, rank_offset=3)),  # the target in both, one rank on both sides
]

def here(submesh):
    return [device for device in submesh.mesh.devices.flat if device.process_index == me]


for one, other in PAIRS:
    for route in ("leader", "sliced"):
        rows = math.lcm(one.dp, other.dp) * 5
        dense = np.arange(rows * 5, dtype=np.float32).reshape(rows, 5)
        aval = jax.ShapeDtypeStruct(dense.shape, dense.dtype)
        boundary = Boundary("a->b", world.submesh(one, 0), world.submesh(other, 0), aval, world, route=route)
        assert boundary.kind == "rendezvous"
        for transfer in (boundary.forward, boundary.backward):
            if not (here(transfer.source) or here(transfer.target)):
                assert not transfer.mover.programs(), "compiled for nobody"
            packed = ()
            if here(transfer.source):
                there = transfer.source_aval.sharding
                packed = transfer.pack(jax.make_array_from_callback(dense.shape, there, lambda i: dense[i]))
            moved = transfer.move(packed)
            if here(transfer.target):
                arrived = {shard.device: shard.data for shard in transfer.unpack(moved).addressable_shards}
                assert arrived.keys() == set(here(transfer.target))
                for i, device in enumerate(transfer.target.mesh.devices.flat):
                    per = rows // transfer.target.layout.dp
                    start = i // transfer.target.layout.replica_size * per
                    if device in arrived:
                        np.testing.assert_array_equal(np.asarray(arrived[device]), dense[start : start + per])
print("every element right")
"""


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


@pytest.mark.slow
def test_collectives_carry_pieces_between_processes():
    port, environment = free_port(), {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = ["timeout", "-k", "5", "240", sys.executable, "-c", PROCESS]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(port)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for i in range(2)
    ]
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0, output
        assert "every element right" in output
