"""Tell a run something while it goes on: `python tools/steer.py RUN COMMAND`.

    set lr=1e-5   the learning rate from the next step on
    pause         take no further step until `resume`; rollouts fill the window meanwhile
    resume        go on
    save          write a checkpoint
    eval          evaluate on the held-out tasks
    stop          write a checkpoint and end; go on later with --ckpt.resume latest

RUN is the run's output folder, on the host of rank 0. A command takes effect at the boundary of a step and is in the
run's journal.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """0 when the command lies where the run looks for it."""
    sys.path.insert(0, str(ROOT))
    from spmd_rl.orchestrator.steering import FOLDER, SteerError, parse

    if len(argv) < 2 or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    run, command = Path(argv[0]), " ".join(argv[1:])
    try:
        parse(command)
    except SteerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not (run / "config.toml").exists():
        print(f"error: {run} is no output folder of a run: it has no config.toml", file=sys.stderr)
        return 2
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    name = f"{time.time_ns():020d}"
    writing = folder / f"{name}.part"
    writing.write_text(command, encoding="utf-8")
    writing.rename(folder / f"{name}.txt")  # the run sees all of it or nothing
    print(f"{command!r} will take effect at the next step of {run}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
