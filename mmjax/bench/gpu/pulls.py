"""Copies that another process pulls (``World.transport='device_put'`` over processes), here of one process from itself.

The bytes take the way that they take between processes of a host: to the host's memory, through a socket, and back.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from mmjax import jax_compat
from mmjax.bench.gpu.job import Job

DTYPES = ("float32", "bfloat16")
COPIES = 5
_HOST = "127.0.0.1"


def run(job: Job) -> None:
    """Offers arrays before they are computed, and pulls them; notes the rate, and checks the values bit for bit."""
    server = jax_compat.transfer_server(_HOST)
    connection = server.connect(server.address())
    sharding = SingleDeviceSharding(jax.devices()[0])
    size = 1 << (12 if job.small else 25)
    rates: dict[str, float] = {}
    for number, dtype in enumerate(DTYPES):
        values = jax.random.normal(jax.random.key(0), (size,)).astype(jnp.dtype(dtype))
        scale = jax.jit(lambda x: x * 2)
        seconds = []
        same = True
        for copy in range(COPIES):
            uuid = number * COPIES + copy
            start = time.perf_counter()
            sent = scale(values)
            server.await_pull(uuid, [sent])
            aval = jax.ShapeDtypeStruct(sent.shape, sent.dtype, sharding=sharding)
            (pulled,) = jax.block_until_ready(connection.pull(uuid, [aval]))
            seconds.append(time.perf_counter() - start)
            same = same and np.array_equal(np.asarray(sent).view(np.uint8), np.asarray(pulled).view(np.uint8))
        rates[dtype] = values.nbytes / min(seconds) / 1e9
        job.note(gb_per_s=rates)
        job.check(f"{dtype} pulled", same)
