"""spmd_rl: one program on every rank. Parse, join the world, take a role, run.

    torchrun --nproc-per-node 3 spmd_rl/main.py rl|sft --config FILE.toml [--KEY VALUE ...] [--dry-run] [--bench]
    python spmd_rl/main.py eval|generate|serve --config FILE.toml --model.name FOLDER  [--KEY VALUE ...] [--dry-run]
    python spmd_rl/main.py doctor [--config FILE.toml]    is this machine, and under torchrun this cluster, fit?

Without RANK in the environment it starts itself under torchrun, with the fewest processes that the config needs; with
NNODES there as one of several machines (launch/node.sh); and with a [slurm] table as a job of the cluster.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the clone, installed or not; never this folder itself
if __name__ == "__main__" and sys.argv[1:2] == ["doctor"]:  # first: it has to work where the imports below do not
    sys.exit(import_module("spmd_rl.doctor.role").main(sys.argv[2:]))
from spmd_rl.algorithms.check import check_algorithm  # noqa: E402
from spmd_rl.config import ALL_TRAIN, Config, ConfigError, command_of, config_for, split_argv  # noqa: E402
from spmd_rl.world.accelerators import spare_process  # noqa: E402
from spmd_rl.world.error_file import write_error_file  # noqa: E402
from spmd_rl.world.launcher import hear_sigterm, take_nproc  # noqa: E402
from spmd_rl.world.meeting import MeetingError  # noqa: E402
from spmd_rl.world.mesh import Mesh, MeshError  # noqa: E402
from spmd_rl.world.placement import processes_by_host  # noqa: E402
from spmd_rl.world.start import show, start  # noqa: E402

# What rank 0 runs; the other ranks take the role that the mesh gives them.
COMMANDS = {
    "rl": "spmd_rl.orchestrator.role",
    "rl --bench": "spmd_rl.trainer.bench_rl",
    "sft": "spmd_rl.trainer.sft",
    "sft --bench": "spmd_rl.trainer.bench_sft",
    "eval": "spmd_rl.orchestrator.eval_role",
    "generate": "spmd_rl.orchestrator.generate_role",
    "serve": "spmd_rl.orchestrator.serve_role",
}


def main(argv: list[str]) -> int:
    """Returns the exit code of what never became a rank; a rank ends in `run_rank`."""
    try:
        argv, nproc = take_nproc(argv)
        if not argv or argv[0] not in COMMANDS:
            raise ConfigError([f"what to do: main.py {{{','.join(COMMANDS)},doctor}} --config FILE"], "command line")
        config = config_for(command := command_of(argv), argv[1:])
        if argv[0] == "rl":
            check_algorithm(config)
        dry_run = split_argv(argv[1:]).dry_run
        if "RANK" not in os.environ:
            return start(str(Path(__file__).resolve()), argv, config, nproc, dry_run)
        hear_sigterm()
        spare = spare_process(config.deployment.device, os.environ)
        mesh = Mesh.of(command, config, int(os.environ["WORLD_SIZE"]), spare, processes_by_host(os.environ))
    except (ConfigError, MeshError, MeetingError) as error:
        write_error_file(f"error: {error}", first=os.environ.get("RANK") == "0")
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    if dry_run:
        print(show(config, mesh))
        return 0
    run_rank(command, config, mesh)


def run_rank(command: str, config: Config, mesh: Mesh) -> NoReturn:
    """This process is a rank: join, play the role, leave. Ends the process, with 0 only when every rank finished."""
    from spmd_rl.observe.logs import redirect_rank_output
    from spmd_rl.observe.timeline import Spans, draw
    from spmd_rl.world.watchdog import Watchdog
    from spmd_rl.world.world import World, start_beside

    rank = int(os.environ["RANK"])
    role, deadlines = mesh.role(rank), config.deadlines
    watchdog = Watchdog(rank, mesh.world_size, role, deadlines.heartbeat_s, deadlines.start_s)
    watchdog.start()
    watchdog.heed_signals(rank)
    try:
        world = World.join(config, mesh, watchdog)
        output = redirect_rank_output(config.output_dir, rank, console=rank in config.log.console_ranks)
        folder = Path(config.output_dir) / "timeline"
        spans = Spans(folder / f"rank_{rank:05d}.jsonl" if config.log.timeline else None, rank, role, limit=50_000)
        watchdog.span, watchdog.tick = spans.span, partial(spans.add, "tick", track="clock")
        watchdog.on_verdict = lambda text: (output.restore() if rank == 0 else None, print(text, file=sys.stderr))
        shared = mesh.shares and rank == 0
        beside = start_beside(import_module(COMMANDS[command]).run, world.as_orchestrator(), output) if shared else None
        first = command in ALL_TRAIN or (rank == 0 and not beside)
        module = COMMANDS[command] if first else f"spmd_rl.{role}.role"
        import_module(module).run(world, *([output] if first and rank == 0 else []))
        if beside:
            beside.join()
        spans.close()
        world.leave()
        if rank == 0 and config.log.timeline:
            draw(folder)
        output.restore()
    except BaseException as error:
        watchdog.fail(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # interpreter shutdown would run destructors of groups whose peers are already gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
