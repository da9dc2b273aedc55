"""The ranks of `bench clock`: rank 0 conducts, all others are leaders. Argument: result file."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.config.tree import ClockConfig
from spmd_rl.world.clock import Conductor, Leader
from spmd_rl.world.groups import init_world
from spmd_rl.world.messages import Cancel, Refused, Stop
from spmd_rl.world.pipe import FRAME_BYTES

ROUNDS, WARM_UP, FULL_S, IDLE_S = 400, 50, 3.0, 5.0
AROUND = 2  # an event leaves with the tick after its decision's: so every tick has about one of each per leader
NO_PERIOD_S = 1e-6  # a tick follows the last one at once


def die(error: BaseException) -> None:
    print(error, flush=True)
    os._exit(1)


def ping_pong(group: dist.ProcessGroup) -> dict[str, float]:
    """Seconds of one raw exchange, a frame to every leader and a frame back, and this thread's CPU for it."""
    peers = range(1, dist.get_world_size()) if dist.get_rank() == 0 else [0]
    out = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    frames = [torch.zeros(FRAME_BYTES, dtype=torch.uint8) for _ in peers]
    started = cpu = 0.0
    for number in range(WARM_UP + ROUNDS):
        if number == WARM_UP:
            started, cpu = time.perf_counter(), time.thread_time()
        if dist.get_rank() == 0:
            works = [dist.isend(out, group=group, group_dst=peer) for peer in peers]
            works += [dist.irecv(frame, group=group, group_src=peer) for peer, frame in zip(peers, frames, strict=True)]
            for work in works:
                work.wait()
        else:
            dist.irecv(frames[0], group=group, group_src=0).wait()
            dist.isend(out, group=group, group_dst=0).wait()
    return {
        "raw_s": (time.perf_counter() - started) / ROUNDS,
        "raw_cpu_s": (time.thread_time() - cpu) / ROUNDS,
    }


class Load:
    """Rank 0: every event is answered with a decision at once."""

    def __init__(self) -> None:
        self.events = self.decisions = 0
        self.clock: Conductor | None = None

    def deliver(self, member: int, event: Any) -> None:
        self.events += 1
        self.decide(member)

    def decide(self, member: int) -> None:
        self.decisions += 1
        self.clock.decide(member, Cancel(self.decisions))

    def counts(self) -> tuple[float, ...]:
        return (time.perf_counter(), thread_cpu_s(self.clock), self.clock.ticks, self.decisions, self.events)


def conduct_at_full_speed(group: dist.ProcessGroup, each: int) -> dict[str, float]:
    """Rank 0: ticks one after the other, with `each` decisions per leader on their way round all the time."""
    load, members = Load(), dist.get_world_size() - 1
    clock = load.clock = Conductor(group, [f"rank {i + 1}" for i in range(members)], NO_PERIOD_S, load.deliver, die)
    for member in each * list(range(members)):
        load.decide(member)
    clock.start()
    time.sleep(0.5)
    before = load.counts()
    time.sleep(FULL_S)
    wall_s, cpu_s, ticks, decisions, events = (now - b for now, b in zip(load.counts(), before, strict=True))
    clock.stop()
    clock.join()
    return {"tick_s": wall_s / ticks, "cpu_s": cpu_s / ticks, "decisions": decisions / ticks, "events": events / ticks}


def lead_at_full_speed(group: dist.ProcessGroup) -> None:
    """A leader: every decision is answered with an event."""
    leader = Leader(group, die)
    leader.start()
    while not isinstance(decision := leader.inbox.get(), Stop):
        leader.tell(Refused(decision.id, "not in flight"))
    leader.join()


def idle(group: dist.ProcessGroup) -> dict[str, float]:
    """Any rank: CPU of the clock's thread, and of the whole process, while nothing happens; shares of wall time."""
    period_s = ClockConfig().period_ms / 1e3
    if dist.get_rank() == 0:
        names = [f"rank {rank}" for rank in range(1, dist.get_world_size())]
        clock: Conductor | Leader = Conductor(group, names, period_s, lambda member, event: None, die)
    else:
        clock = Leader(group, die)
    clock.start()
    time.sleep(0.5)
    started, thread, process = time.perf_counter(), thread_cpu_s(clock), time.process_time()
    ticks = getattr(clock, "ticks", 0)
    time.sleep(IDLE_S)
    wall_s = time.perf_counter() - started
    shares = {"thread": (thread_cpu_s(clock) - thread) / wall_s, "process": (time.process_time() - process) / wall_s}
    if isinstance(clock, Conductor):
        shares["tick_s"] = wall_s / (clock.ticks - ticks)
        time.sleep(1.0)  # the others measure a little later
        clock.stop()
    clock.join()
    return shares


def thread_cpu_s(thread: threading.Thread) -> float:
    """CPU time that another thread of this process has used."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def main() -> None:
    out = sys.argv[1]
    torch.set_num_threads(1)
    init_world(600)
    ranks = list(range(dist.get_world_size()))
    raw, ctl = dist.new_group(ranks), dist.new_group(ranks)
    dist.barrier()
    figures = ping_pong(raw)
    for name, each in (("empty", 0), ("full", AROUND)):
        dist.barrier()
        if dist.get_rank() == 0:
            figures |= {f"{name}_{key}": value for key, value in conduct_at_full_speed(ctl, each).items()}
        else:
            lead_at_full_speed(ctl)
    dist.barrier()
    gathered: list[dict[str, float]] = [{} for _ in ranks]
    dist.all_gather_object(gathered, idle(ctl))
    if dist.get_rank() == 0:
        conductor, leaders = gathered[0], gathered[1:]
        figures |= {
            "cores": os.cpu_count(),
            "tick_s": figures["full_tick_s"],
            "tick_ratio": figures["full_tick_s"] / figures["raw_s"],
            "idle_tick_s": conductor["tick_s"],
            "conductor_share": conductor["thread"],
            "leader_share": max(leader["thread"] for leader in leaders),
            "conductor_process_share": conductor["process"],
            "leader_process_share": max(leader["process"] for leader in leaders),
        }
        Path(out).write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
