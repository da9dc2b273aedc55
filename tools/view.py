"""A page to read a run's rollouts in: `python tools/view.py RUN` writes RUN/view.html.

    python tools/view.py RUN                    all steps
    python tools/view.py RUN --steps 10:20      steps 10 to 20; 10: from 10 on; :20 up to 20; 15 alone
    python tools/view.py RUN --max-mb 200       a larger page: 50 MB by default, each step with its share
    python tools/view.py RUN --out page.html    written there instead

RUN is the output folder of a run, also of one that goes on. The page is one file, without server or network: open it,
or send it to somebody. How many episodes of a step a run writes down is log.rollouts_per_step.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmd_rl.observe.view import LATEST, write_page


def main(argv: list[str]) -> int:
    """0 when the page is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--steps", type=steps, default=(0, LATEST), metavar="FIRST:LAST")
    parser.add_argument("--max-mb", type=megabytes, default=50.0, metavar="MB")
    parser.add_argument("--out", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    out = given.out or given.run / "view.html"
    try:
        page = write_page(given.run, out, given.steps, int(given.max_mb * 1e6))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    count = len({shown.facts["step"] for shown in page.shown})
    print(f"{out}: {len(page.shown)} episodes of {count} steps, {page.size / 1e6:.1f} MB")
    if page.left_out:
        print(f"left out to stay within {given.max_mb:g} MB: {page.left_out} episodes; see --steps and --max-mb")
    return 0


def steps(text: str) -> tuple[int, int]:
    """The first and the last step of FIRST:LAST, either of which may be missing; or of one number."""
    found = re.fullmatch(r"([0-9]*)(:?)([0-9]*)", text)
    if not found or not text:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps; write 10:20, 10:, :20 or 15")
    first, colon, last = found.groups()
    if not colon:
        return int(first), int(first)
    chosen = int(first or 0), int(last or LATEST)
    if chosen[0] > chosen[1]:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins; write the smaller step first")
    return chosen


def megabytes(text: str) -> float:
    """A positive number."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no size in megabytes; write a number above 0, such as 50")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
