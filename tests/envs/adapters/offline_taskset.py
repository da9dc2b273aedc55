"""A taskset of verifiers 0.4 that needs no network: reversed words, sums with a tool, a guessing game, two players."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from typing import ClassVar, Literal

import verifiers.v1 as vf

Kind = Literal["reverse", "sum", "fails", "hangs", "slow_score", "unrewarded", "container", "stops", "example"]


class OfflineConfig(vf.TasksetConfig):
    kind: Kind = "reverse"
    length: int = 4
    count: int = 40
    endless: bool = False
    seeded: bool = True


class OfflineData(vf.TaskData):
    answer: str


class Counter(vf.State):
    calls: int = 0


class Calculator(vf.Toolset[vf.ToolsetConfig, Counter]):
    """Tools of one task, which count their calls in the trace's state."""

    TOOL_PREFIX = "calc"
    closed: ClassVar[list[str]] = []  # answers of the tasks whose tools were closed

    async def setup(self) -> None:
        self._exit_stack.callback(lambda: self.closed.append(self.answer))

    async def setup_task(self, task: OfflineData) -> None:
        self.answer = task.answer

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two integers."""
        self.state.calls += 1
        await asyncio.sleep(0)
        return a + b

    @vf.tool
    def peek(self) -> str:
        """Say the answer."""
        return self.answer

    @vf.tool
    def fail(self) -> str:
        """Raise."""
        raise RuntimeError("no such luck \ud800")

    @vf.tool
    def shout(self) -> str:
        """Say something long."""
        return "ha" * 20_000


class Encyclopedia(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """A tool that all tasks share."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        self.asked = 0

    @vf.tool
    def look_up(self, word: str) -> str:
        """Look a word up."""
        self.asked += 1
        return f"{word}: asked {self.asked} times"


class AnyTask(vf.Task[OfflineData]):
    """What all tasks of the taskset are: a taskset's shared tools are for them alone."""


class OfflineTask(AnyTask):
    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class SumTask(AnyTask, vf.Task[OfflineData, Counter]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return trace.state.calls


class FailingTask(OfflineTask):
    @vf.reward
    async def broken(self, trace: vf.Trace) -> float:
        raise KeyError("the reward's own mistake")


class HangingTask(OfflineTask):
    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await asyncio.sleep(1000)


class SlowScoreTask(OfflineTask):
    @vf.reward
    async def slow(self, trace: vf.Trace) -> float:
        await asyncio.sleep(1000)
        return 1.0


class UnrewardedTask(AnyTask):
    pass


class ContainerTask(OfflineTask):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.run(["ls"], {})


class StoppingTask(SumTask):
    @vf.stop
    async def called_often(self, trace: vf.Trace) -> bool:
        return trace.state.calls >= 2

    @vf.intercept
    def no_peeking(self, request: vf.Request) -> vf.Request | None:
        last = request.messages[-1]
        if not isinstance(last, vf.ToolMessage) or last.name != "calc_peek":
            return None
        request.messages[-1] = last.model_copy(update={"content": "peeking is not allowed"})
        return request


TASKS: dict[str, type[vf.Task]] = {
    "reverse": OfflineTask,
    "sum": SumTask,
    "fails": FailingTask,
    "hangs": HangingTask,
    "slow_score": SlowScoreTask,
    "unrewarded": UnrewardedTask,
    "container": ContainerTask,
    "stops": StoppingTask,
    "example": OfflineTask,
}


class OfflineTaskset(vf.Taskset[AnyTask, OfflineConfig]):
    def __init__(self, config: OfflineConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.endless

    @classmethod
    def toolsets(cls, config: OfflineConfig) -> list[vf.Toolset]:
        return [Encyclopedia(vf.SharedToolsetConfig())] if config.kind == "sum" else []

    def load(self) -> Iterator[vf.Task]:
        config = self.config
        for number in itertools.count() if config.endless else range(config.count):
            rng = random.Random(f"reverse {number}") if config.seeded else random.Random()
            yield TASKS[config.kind](self.row(rng), config.task)

    def row(self, rng: random.Random) -> OfflineData:
        config = self.config
        if config.kind in ("sum", "stops"):
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            return OfflineData(prompt=f"{a}+{b}=?", answer=str(a + b))
        word = "".join(rng.sample("abcdefghijklmnop", config.length))
        if config.kind == "example":
            shown = [vf.UserMessage(content="ab"), vf.AssistantMessage(content="ba"), vf.UserMessage(content=word)]
            return OfflineData(system_prompt="Reverse.", prompt=shown, answer=word[::-1])
        return OfflineData(system_prompt="Reverse.", prompt=word, answer=word[::-1])


__all__ = ["OfflineTaskset"]
