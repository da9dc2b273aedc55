"""A rank that is gone, or stopped, in any phase ends the run everywhere; what was saved is taken up again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from spmd_rl.world.checkpoints import complete, read_state
from tests.e2e.runner import Launch
from tests.e2e.test_killed import ENDLESS, HEARTBEAT_S, ROLES

KILLER = Path(__file__).with_name("kill_at.py")
GONE, STOPPED = int(signal.SIGKILL), int(signal.SIGSTOP)
LOOP, LEARNER = "spmd_rl.orchestrator.loop", "spmd_rl.trainer.learner:Learner"

# phase: (rank, function, its nth call, signal)
PHASES = {
    "orchestrator packs": (0, f"{LOOP}:pack", 2, STOPPED),
    "orchestrator takes a snapshot": (0, f"{LOOP}:Loop._snapshot", 2, GONE),
    "trainer, forward": (1, f"{LEARNER}._forward_backward", 2, STOPPED),
    "trainer, optimizer": (1, f"{LEARNER}._apply_gradients", 2, GONE),
    "trainer sends weights": (1, "spmd_rl.world.weights:Sender.send", 3, STOPPED),
    "trainer sends a bucket into a swap": (1, "spmd_rl.world.buckets:Bucket.seal", 45, STOPPED),
    "trainer writes a checkpoint": (1, "spmd_rl.trainer.checkpoint:seal", 2, GONE),
    "engine samples": (2, "spmd_rl.inference.engine:Engine.step", 20, GONE),
    "engine receives a bucket": (2, "spmd_rl.world.weights:Receiver._receive_bucket", 45, STOPPED),
    "engine swaps weights": (2, "spmd_rl.inference.engine:Engine.swap", 3, GONE),
}


@pytest.mark.parametrize("phase", PHASES)
def test_the_run_ends_everywhere_and_names_the_rank(model, tmp_path, phase):
    rank, where, nth, number = PHASES[phase]
    args = [*ENDLESS, "--model.name", model, "--ckpt.interval", "1"]
    if "bucket" in phase:  # about 20 of them, received while the engine stands still
        args += ["--weights.staging", "buckets", "--weights.bucket-mb", "0.1"]
    env = {"KILL_AT": f"{rank} {where} {nth} {number}"}
    with Launch(tmp_path / "run", args, env=env, program=KILLER) as launch:
        done = launch.wait(60 + 4 * HEARTBEAT_S)  # which also looks for processes and shared memory left behind
    assert done.returncode != 0
    end = done.last_lines()
    if number == GONE:
        assert f"rank      : {rank} (" in end and "SIGKILL" in end, done.output[-4000:]
    else:
        assert f"rank {rank} ({ROLES[rank]})" in end and "no sign of life for" in end, done.output[-4000:]
    for folder in complete(tmp_path / "run/checkpoints"):
        read_state(folder)  # what has a name is whole
