"""One process of a replay (see ``replay``): runs the ops of one block of ranks, each as a sleep. Run as a file.

Only Python's own modules are imported, so that many such processes start fast and need little memory.

On stdin comes a line of JSON, the plan:

    {"block": 0, "inbox": fd, "outboxes": {"1": fd, …},
     "ops": [[index, seconds, [[index waited for, delay], …], [blocks it runs with], [blocks to report to]], …]}

and then for each repeat a line with the time on the monotonic clock at which the step starts. On stdout goes ``ready``,
and after each step a line of JSON ``[[index, start, end], …]``. A message to another block is 16 bytes: the op's index;
the sender if it is ready to start the op, or -1 if the op has ended; and the time.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import struct
import sys
import time

MESSAGE = struct.Struct("<iid")
ENDED = -1


class RankBlock:
    """The ops of one block of ranks in their order."""

    def __init__(self, plan: dict):
        self.block, self.inbox, self.ops = plan["block"], plan["inbox"], plan["ops"]
        self.outboxes = {int(block): fd for block, fd in plan["outboxes"].items()}
        self.arrived: dict[tuple[int, int], float] = {}
        self.ended: dict[int, float] = {}

    def step(self) -> list[tuple[int, float, float]]:
        """Runs every op once; returns (index, start, end) of each."""
        self.arrived.clear()
        self.ended.clear()
        report = []
        for index, seconds, waits, together, reports_to in self.ops:
            for before, delay in waits:
                ended = self.ended[before] if before in self.ended else self.receive(before, ENDED)
                sleep_until(ended + delay)
            for block in together:
                self.send(block, index, self.block)
            for block in together:
                self.receive(index, block)
            start = time.monotonic()
            sleep_until(start + seconds)
            end = self.ended[index] = time.monotonic()
            for block in reports_to:
                self.send(block, index, ENDED)
            report.append((index, start, end))
        return report

    def send(self, block: int, index: int, sender: int) -> None:
        """Sends a message. A write of so few bytes is atomic, so that many processes may share an inbox."""
        os.write(self.outboxes[block], MESSAGE.pack(index, sender, self.ended.get(index, 0.0)))

    def receive(self, index: int, sender: int) -> float:
        """Waits for a message; others that come before it are kept."""
        while (index, sender) not in self.arrived:
            data = os.read(self.inbox, 256 * MESSAGE.size)
            for i, s, when in MESSAGE.iter_unpack(data):
                self.arrived[i, s] = when
        return self.arrived.pop((index, sender)) if sender != ENDED else self.arrived[index, sender]


def sleep_until(when: float) -> None:
    """Sleeps until the monotonic clock shows ``when``."""
    while (left := when - time.monotonic()) > 0:
        time.sleep(left)


def request_priority() -> None:
    """Asks for real-time priority, to run as soon as a sleep or a wait ends; the system may refuse it."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def main() -> None:
    """Runs a step for every line on stdin after the plan."""
    block = RankBlock(json.loads(sys.stdin.readline()))
    gc.disable()
    request_priority()
    print("ready", flush=True)
    for line in sys.stdin:
        sleep_until(float(line))
        print(json.dumps(block.step()), flush=True)


if __name__ == "__main__":
    main()
