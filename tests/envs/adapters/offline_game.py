"""Environments of verifiers 0.4 for `offline_taskset`: a game of several turns, and one of two players."""

from __future__ import annotations

import verifiers.v1 as vf


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    host: vf.AgentConfig = vf.AgentConfig(max_turns=8)
    players: int = 1
    breaks: bool = False


class GameEnv(vf.Env[GameConfig]):
    """The player reverses the task's word letter by letter; the environment says right or wrong after each.

    With two players, the host names the word to the second one, and isn't trained.
    """

    async def setup(self, agents: vf.Agents) -> None:
        agents.host.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        if self.config.breaks:
            raise RuntimeError("the game's own mistake")
        async with agents.player.interaction(task) as game:
            said = await game.turn()
            for letter in task.data.answer[1:]:
                if said.terminated:
                    break
                said = await game.turn(f"next, not {letter!r}")
        if self.config.players == 2:
            await agents.player.run(task)
            await agents.host.run(task)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        for place, trace in enumerate(episode.traces):
            trace.record_reward("place", place)


__all__ = ["GameEnv"]
