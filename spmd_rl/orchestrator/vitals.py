"""How rank 0 itself is doing: how late its event loop is, and how the worker pools of its sources fare.

All of it is measured in time or depends on it, so the names say `perf/`: two equal runs differ in them.
"""

from __future__ import annotations

from spmd_rl.envs.pool.environment import PooledEnvironment
from spmd_rl.envs.pool.lag import LoopLag, lag_metrics
from spmd_rl.orchestrator.sources import Source


class Vitals:
    """Of one run; made inside its event loop."""

    def __init__(self, sources: list[Source]) -> None:
        self._pools = {source.name: source.env for source in sources if isinstance(source.env, PooledEnvironment)}
        self._lag = LoopLag()
        self._lag.start()

    def metrics(self) -> dict[str, float]:
        """Since the last call."""
        metrics = lag_metrics("perf/loop_", self._lag.take())
        for name, env in self._pools.items():
            metrics |= {f"perf/{key}/{name}": value for key, value in env.metrics().items()}
        return metrics
