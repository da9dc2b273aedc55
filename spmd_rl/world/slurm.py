"""From the `[slurm]` table to a job: the script is rendered from a template, written, and handed to sbatch.

    OUTPUT/job/   config.toml (what the job runs), job.sbatch, id (of the last job), slurm-JOBID.out (its output)

The job runs the same command with the same config, but for `slurm.nodes = 0`. What happens on its nodes is
`launch/srun.sh`'s business, and what the run does is the program's. It refuses to know about torch.

Invariants: nothing is written before the template has rendered; a job that is still queued or running keeps its files.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spmd_rl.config.errors import ConfigError
from spmd_rl.config.show import write_toml
from spmd_rl.config.slurm import SlurmConfig
from spmd_rl.config.tree import Config
from spmd_rl.world.launcher import JOB_FOLDER

if TYPE_CHECKING:
    import jinja2

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "launch/slurm.sbatch.j2"
ASK_S = 60.0  # a controller that does not answer
GONE = ("", "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


class SlurmError(ConfigError):
    """The job can't be made, or was not taken."""

    def __init__(self, problem: str) -> None:
        super().__init__([problem], "slurm")


def layout(s: SlurmConfig, smallest: int, spare: int) -> tuple[int, ...]:
    """Processes on each node of the job, the first node first.

    smallest: the fewest ranks that will do. spare: how many the first node starts beyond one per GPU.
    """
    if s.processes:
        return (s.processes,) * s.nodes
    if not s.gpus:  # one node, as `check_slurm` has seen to
        return (smallest,)
    return (s.gpus + spare, *(s.gpus,) * (s.nodes - 1))


def submit(command: str, config: Config, ranks: tuple[int, ...], dry_run: bool) -> str:
    """Write the job of `main.py COMMAND`, hand it to sbatch unless it is a dry run, and say what was done.

    ranks: processes of each node. Raises SlurmError.
    """
    folder = (Path(config.output_dir) / JOB_FOLDER).resolve()
    script = render(command, config, ranks, folder)
    if not dry_run and not shutil.which("sbatch"):
        raise SlurmError(
            "there is no sbatch here: submit from a login node of the cluster, set slurm.nodes = 0 to run on this "
            "machine, or --dry-run to write the job only"
        )
    if running := _running(folder):
        raise SlurmError(
            f"output_dir {config.output_dir!r} is that of job {running}: choose another output_dir, or scancel that job"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_toml(replace(config, slurm=replace(config.slurm, nodes=0)), folder / "config.toml")
    path = folder / "job.sbatch"
    path.write_text(script, encoding="utf-8")
    if dry_run:
        return f"{script}\nwritten, not submitted; submit it with: sbatch {shlex.quote(str(path))}"
    job = _ask(["sbatch", "--parsable", str(path)], "sbatch did not take the job").split(";")[0].strip()
    (folder / "id").write_text(f"{job}\n")
    return (
        f"job {job} ({path})\n"
        f"  output  {folder}/slurm-{job}.out\n"
        f"  state   squeue -j {job}\n"
        f"  end     touch {shlex.quote(str(folder.parent / 'stop'))} saves and ends; scancel {job} ends"
    )


def render(command: str, config: Config, ranks: tuple[int, ...], folder: Path) -> str:
    """The job's script. folder: where its files lie. SlurmError with the template's line when that can't be done."""
    import jinja2

    path = Path(config.slurm.template_path) if config.slurm.template_path else TEMPLATE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SlurmError(f"slurm.template_path = {str(path)!r} can't be read: {reason}") from None
    jinja = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    jinja.filters["quote"] = lambda value: shlex.quote(str(value))
    facts = {
        "slurm": config.slurm,
        "command": command,
        "config": str(folder / "config.toml"),
        "folder": str(folder),
        "output_dir": str(folder.parent),
        "max_steps": config.max_steps,
        "job_name": config.slurm.job_name or folder.parent.name,
        "ranks": ranks,
        "python": sys.executable,
        "root": str(ROOT),
        "cwd": str(Path.cwd()),
    }
    try:
        script = jinja.from_string(text).render(facts)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None) or _line_of(error)
        known = f" (known: {', '.join(facts)})" if isinstance(error, jinja2.UndefinedError) else ""
        raise SlurmError(f"{path}, line {line}: {error.message}{known}") from None
    if not script.startswith("#!"):
        raise SlurmError(f"{path}: the script does not begin with #!, so sbatch would not take it")
    return script


def _line_of(error: jinja2.TemplateError) -> int:
    """The template's line in the traceback, which jinja2 rewrites so that it holds one."""
    trace, line = error.__traceback__, 0
    while trace:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _running(folder: Path) -> str:
    """The job whose files these are, if it has not ended; empty where nobody knows."""
    noted = folder / "id"
    if not noted.exists() or not shutil.which("squeue"):
        return ""
    job = noted.read_text().strip()
    try:
        state = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format", "%T"], capture_output=True, text=True, timeout=ASK_S
        ).stdout.strip()
    except subprocess.TimeoutExpired:
        return ""
    return "" if state in GONE else f"{job}, which is {state}"


def _ask(command: list[str], failed: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{failed}: no answer in {ASK_S:g} s; is Slurm's controller up (scontrol ping)?") from None
    if done.returncode:
        raise SlurmError(f"{failed}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
