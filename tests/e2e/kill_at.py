"""The program, and a rank of it that ends in a certain moment: KILL_AT="rank module:function nth signal".

The function is named as it is found at run time (`module:Class.method`); on the nth call of it, on that rank, the
process gets the signal (9 = gone, 19 = stopped) before the function does anything.
"""

from __future__ import annotations

import os
import sys
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def arm() -> None:
    """Wrap the function on the rank that it is about."""
    rank, where, nth, number = os.environ["KILL_AT"].split()
    if os.environ.get("RANK") != rank:
        return
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, import_module(module))
    function, calls = getattr(owner, name), iter(range(1, 10**9))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == int(nth):
            os.kill(os.getpid(), int(number))
        return function(*args, **kwargs)

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from spmd_rl.main import main

    arm()
    sys.argv[0] = str(ROOT / "spmd_rl/main.py")
    sys.path[0] = str(ROOT)
    sys.exit(main(sys.argv[1:]))
