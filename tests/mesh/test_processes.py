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
PAIRS = [  # the first on the devices of process 0, the second on those of process 1
    (Layout(dp=4), Layout(dp=2, tp=2, rank_offset=4)),
    (Layout(dp=2, tp=2), Layout(tp=3, rank_offset=4)),
    (Layout(dp=2), Layout(dp=3, rank_offset=4)),
    (Layout(dp=2, tp=2), Layout(dp=2, cp=2, rank_offset=4)),
]
for one, other in PAIRS:
    for route in ("leader", "sliced"):
        rows = math.lcm(one.dp, other.dp) * 5
        dense = np.arange(rows * 5, dtype=np.float32).reshape(rows, 5)
        aval = jax.ShapeDtypeStruct(dense.shape, dense.dtype)
        boundary = Boundary("a->b", world.submesh(one, 0), world.submesh(other, 0), aval, world, route=route)
        assert boundary.kind == "rendezvous"
        for sender, transfer in enumerate((boundary.forward, boundary.backward)):
            packed = ()
            if me == sender:
                there = transfer.source_aval.sharding
                packed = transfer.pack(jax.make_array_from_callback(dense.shape, there, lambda i: dense[i]))
            moved = transfer.move(packed)
            if me != sender:
                arrived = transfer.unpack(moved)
                for rank, device in enumerate(transfer.target.mesh.devices.flat):
                    per = rows // transfer.target.layout.dp
                    start = rank // transfer.target.layout.replica_size * per
                    (shard,) = (s.data for s in arrived.addressable_shards if s.device == device)
                    np.testing.assert_array_equal(np.asarray(shard), dense[start : start + per])
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
