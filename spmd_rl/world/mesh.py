"""One global device mesh: which rank plays which role, and every process group there will be.

`Mesh.build(config, world_size)` is a pure function of its arguments: it can be printed on a laptop for a cluster that
does not exist. Rank 0 orchestrates, the next ranks train, the rest infer in replicas of `inference.tp` ranks. Placed
together (`deployment.placement = "colocated"`), the same ranks train and infer in turns. Where no process is to spare
(`deployment.orchestrator`), rank 0 orchestrates on a thread beside its other role. The last replicas may be frozen:
they serve a teacher and never get new weights. `deployment.rank_map` is another order in which roles take ranks; how
the trainer ranks share the model is `trainer_mesh.py`.

It refuses to know about torch and devices; `groups.py` makes the groups it lists, in the order it lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Literal

from spmd_rl.config.commands import ALL_TRAIN
from spmd_rl.config.tree import Config
from spmd_rl.world.trainer_mesh import MeshError, TrainerDims

__all__ = ["GroupSpec", "Mesh", "MeshError", "Role"]

Role = Literal["orchestrator", "trainer", "inference", "colocated"]
SHOWN = 8  # groups of a kind, to people


@dataclass(frozen=True)
class GroupSpec:
    """One process group: its name, its members in order, and what kind of data it carries."""

    name: str
    ranks: tuple[int, ...]
    carries: Literal["host", "device"]  # host: always gloo; device: the accelerator's back end where there is one


@dataclass(frozen=True)
class Mesh:
    """Ranks and roles."""

    world_size: int
    trainers: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]  # of the policy
    frozen: tuple[tuple[int, ...], ...] = ()  # of a teacher
    dims: TrainerDims = field(default_factory=TrainerDims)  # of the trainer ranks
    divided: bool = False  # the ranks of a replica hold experts of their own

    @classmethod
    def of(
        cls, command: str, config: Config, world_size: int, spare: bool = True, processes: Sequence[int] = ()
    ) -> Mesh:
        """The mesh of `main.py COMMAND`; a world of 0 ranks stands for the fewest that will do. Raises MeshError.

        spare: node 0 starts one process more than it has accelerators. processes: of each host; empty = one host.
        """
        if command in ALL_TRAIN:
            asked = config.deployment.train_ranks if command == "rl --bench" else 0
            fewest = asked or TrainerDims.smallest(config.trainer.parallel)
            return cls.all_train(world_size or fewest, config, processes)
        if command == "rl":
            return cls.build(config, world_size or cls.smallest(config), spare, processes)
        return cls.all_infer(config, world_size or 1 + config.inference.tp)

    @classmethod
    def build(cls, config: Config, world_size: int, spare: bool = True, processes: Sequence[int] = ()) -> Mesh:
        """Assign roles. MeshError says which numbers do not fit and what to change."""
        own = cls._own_orchestrator(config, world_size, spare)
        together = config.deployment.placement == "colocated"
        mesh = cls._together(config, world_size, own) if together else cls._apart(config, world_size, own)
        return mesh._placed(config, processes)

    def _placed(self, config: Config, processes: Sequence[int]) -> Mesh:
        """With the ranks that the map names, and the trainer's dimensions."""
        order = _order(config.deployment.rank_map, self.world_size)
        hosts = hosts_of(processes, self.world_size)
        trainers = tuple(order[rank] for rank in self.trainers)
        replicas, frozen = (tuple(tuple(order[r] for r in ranks) for ranks in e) for e in (self.replicas, self.frozen))
        dims = TrainerDims.of(config.trainer.parallel, [hosts[rank] for rank in trainers])
        return Mesh(self.world_size, trainers, replicas, frozen, dims, config.inference.expert_parallel)

    @classmethod
    def _apart(cls, config: Config, world_size: int, own: int) -> Mesh:
        """Some ranks train, others infer."""
        deployment, tp = config.deployment, config.inference.tp
        train, infer, teacher = deployment.train_ranks, deployment.infer_ranks, deployment.teacher_ranks
        free = world_size - own - teacher
        for key, count in (("infer_ranks", infer), ("teacher_ranks", teacher)):
            if count % tp:  # no number of processes helps
                raise MeshError(
                    f"deployment.{key} = {count} is not a multiple of inference.tp = {tp}: a replica takes "
                    f"tp ranks. Set {key} to {-(-count // tp) * tp}, or change tp."
                )
        if not train and not infer:
            half, unit = max(tp, (free - free // 2) // tp * tp), TrainerDims.smallest(config.trainer.parallel)
            fits = [count for count in range(tp, free, tp) if (free - count) % unit == 0]
            infer = min(fits, key=lambda count: abs(count - half), default=half)
        if not infer:
            infer = free - train
        if not train:
            train = free - infer
        if train < 1 or infer < tp or infer % tp or train + infer != free:
            raise MeshError(
                f"{world_size} ranks do not fit: {own} orchestrator + {train} trainer + {infer} inference ranks"
                f"{f' + {teacher} teacher ranks' if teacher else ''} "
                f"(deployment.train_ranks = {deployment.train_ranks}, deployment.infer_ranks = "
                f"{deployment.infer_ranks}, inference.tp = {tp}). Start {cls.smallest(config)} processes, or change "
                f"these keys so that {own} + train_ranks + infer_ranks{' + teacher_ranks' if teacher else ''} = "
                f"{world_size} with infer_ranks a multiple of tp."
            )
        engines = range(own + train, world_size)
        replicas = tuple(tuple(engines[i : i + tp]) for i in range(0, infer + teacher, tp))
        return cls(world_size, tuple(range(own, own + train)), replicas[: infer // tp], replicas[infer // tp :])

    @staticmethod
    def _own_orchestrator(config: Config, world_size: int, spare: bool) -> int:
        """1 where the orchestrator has a rank of its own, else 0."""
        deployment = config.deployment
        if deployment.orchestrator != "auto":
            return int(deployment.orchestrator == "own")
        train, infer = deployment.train_ranks, deployment.infer_ranks
        together = deployment.placement == "colocated"
        if (train or infer) if together else (train and infer):  # the numbers say it
            others = (max(train, infer) if together else train + infer) + deployment.teacher_ranks
            return int(world_size != others)
        return int(spare)

    @classmethod
    def _together(cls, config: Config, world_size: int, own: int) -> Mesh:
        """Every rank behind the orchestrator's own trains and infers, but those of a teacher."""
        deployment, tp = config.deployment, config.inference.tp
        teacher = deployment.teacher_ranks
        both = world_size - own - teacher
        asked = deployment.train_ranks or deployment.infer_ranks or both
        if teacher % tp or both < tp or both % tp or both != asked or deployment.infer_ranks not in (0, both):
            raise MeshError(
                f"{world_size} ranks do not fit: {own} orchestrator + {both} ranks that train and infer in turns"
                f"{f' + {teacher} teacher ranks' if teacher else ''} (deployment.placement = 'colocated', train_ranks "
                f"= {deployment.train_ranks}, infer_ranks = {deployment.infer_ranks}, inference.tp = {tp}). Leave "
                f"train_ranks and infer_ranks 0, or both at the same number, and start {cls.smallest(config)} "
                f"processes, or more by a multiple of tp."
            )
        shared = tuple(range(own, own + both))
        replicas = tuple(tuple(range(i, i + tp)) for i in range(own, world_size, tp))
        return cls(world_size, shared, replicas[: both // tp], replicas[both // tp :])

    @classmethod
    def all_train(cls, world_size: int, config: Config | None = None, processes: Sequence[int] = ()) -> Mesh:
        """Supervised training, and any bench: every rank trains, rank 0 too; nobody infers or orchestrates."""
        return cls(world_size, tuple(range(world_size)), ())._placed(config or Config(), processes)

    @staticmethod
    def smallest(config: Config) -> int:
        """The fewest ranks that the config can run on."""
        deployment, unit = config.deployment, TrainerDims.smallest(config.trainer.parallel)
        own = int(deployment.orchestrator != "shared")
        if deployment.placement == "colocated":
            unit = lcm(unit, config.inference.tp)
            both = max(deployment.train_ranks, deployment.infer_ranks, 1)
            return own + -(-both // unit) * unit + deployment.teacher_ranks
        engines = (deployment.infer_ranks or config.inference.tp) + deployment.teacher_ranks
        return own + (deployment.train_ranks or unit) + engines

    @classmethod
    def all_infer(cls, config: Config, world_size: int) -> Mesh:
        """A model that is only asked: rank 0 orchestrates, every other rank infers, nobody trains."""
        tp, engines = config.inference.tp, world_size - 1
        if engines < tp or engines % tp:
            raise MeshError(
                f"{world_size} ranks do not fit: 1 orchestrator + replicas of inference.tp = {tp} ranks. Start "
                f"{1 + max(tp, engines // tp * tp)} processes, or change tp"
            )
        return cls(world_size, (), tuple(tuple(range(i, i + tp)) for i in range(1, world_size, tp)))

    def role(self, rank: int) -> Role:
        """The role of a global rank."""
        if rank in self.trainers:
            return "colocated" if self.colocated else "trainer"
        return "orchestrator" if rank == 0 else "inference"

    def replica_of(self, rank: int) -> int:
        """Which of `engines` an inference rank belongs to."""
        return next(i for i, ranks in enumerate(self.engines) if rank in ranks)

    @property
    def colocated(self) -> bool:
        """Whether the ranks that train also infer."""
        return bool(self.replicas) and self.replicas[0][0] in self.trainers

    @property
    def shares(self) -> bool:
        """Whether rank 0 orchestrates beside another role."""
        return bool(self.replicas) and 0 in self.trainers

    @property
    def spare(self) -> bool:
        """Whether rank 0's process holds no accelerator: it orchestrates, and does nothing else."""
        return 0 not in self.trainers

    @property
    def engines(self) -> tuple[tuple[int, ...], ...]:
        """All replicas, frozen ones last."""
        return (*self.replicas, *self.frozen)

    @property
    def inference(self) -> tuple[int, ...]:
        """All inference ranks that get new weights."""
        return tuple(rank for replica in self.replicas for rank in replica)

    @property
    def engine_leaders(self) -> tuple[int, ...]:
        """The first rank of each replica."""
        return tuple(replica[0] for replica in self.engines)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The ranks that take part in ticks with rank 0."""
        return tuple(dict.fromkeys((*self.trainers[:1], *self.engine_leaders)))

    def groups(self) -> tuple[GroupSpec, ...]:
        """All groups with members of several ranks, in the one order in which every rank makes them.

        One `weights/i` group per trainer rank: it is the root of every broadcast there, so senders never wait for
        each other and a bucket reaches just the ranks that need it; `experts/i/k` are those of them that are rank k of
        their replica, where ranks hold experts of their own. Ranks that do both need none: their weights are copied
        inside the process.
        """
        own = [GroupSpec("trainer", self.trainers, "device"), GroupSpec("ckpt", self.trainers, "host")]
        if not self.replicas:
            return tuple(own)
        specs = [GroupSpec("ctl", tuple(dict.fromkeys((0, *self.leaders))), "host")]
        if self.trainers:
            specs.append(GroupSpec("data", tuple(dict.fromkeys((0, *self.trainers))), "host"))
        senders = () if self.colocated else self.trainers
        for i, rank in enumerate(senders):
            specs.append(GroupSpec(f"weights/{i}", (rank, *self.inference), "device"))
            takers = zip(*self.replicas, strict=True) if self.divided else ()
            specs += [GroupSpec(f"experts/{i}/{k}", (rank, *ranks), "device") for k, ranks in enumerate(takers)]
        if self.trainers:
            leaders = (replica[0] for replica in self.replicas)
            specs.append(GroupSpec("routes", tuple(dict.fromkeys((*self.trainers, *leaders))), "host"))
        for i, replica in enumerate(self.engines):
            specs += [GroupSpec(f"replica/{i}", replica, "device"), GroupSpec(f"replica_cmd/{i}", replica, "host")]
        return (*specs, *own) if self.trainers else tuple(specs)

    def describe(self) -> str:
        """A few lines for people."""
        lines = [f"mesh of {self.world_size} rank{'s' * (self.world_size > 1)}"]
        lines += ["  rank 0            orchestrator"] if 0 not in self.trainers else []
        lines += ["  rank 0            orchestrator, on a thread beside what follows"] if self.shares else []
        turns = ", in turns with inference" if self.colocated else ""
        lines += [f"  {_span(self.trainers):<17} trainer, {self.dims.describe()}{turns}"] if self.trainers else []
        lines += self._trainer_groups()
        lines += [f"  {_span(r):<17} inference replica {i}, tp {len(r)}" for i, r in enumerate(self.replicas)]
        lines += [f"  {_span(r):<17} frozen replica {i}, tp {len(r)}" for i, r in enumerate(self.frozen)]
        return "\n".join(lines)

    def _trainer_groups(self) -> list[str]:
        """The ranks of each kind of group there is inside the trainer's."""
        d = self.dims
        kinds = {"fsdp": (d.dp_replicate, d.fsdp_groups()), "cp": (d.cp, d.cp_groups()), "ep": (d.ep, d.ep_groups())}
        lines = []
        for kind, (size, groups) in kinds.items():
            if size > 1:
                spans = [_runs([self.trainers[i] for i in group]) for group in groups]
                lines.append(f"  {'':<17}   {kind}: {' | '.join(spans[:SHOWN])}{' | ...' * (len(spans) > SHOWN)}")
        return lines


def hosts_of(processes: Sequence[int], world_size: int) -> list[int]:
    """The number of every rank's host; all on one where nothing is known. MeshError when processes don't add up."""
    if not processes:
        return [0] * world_size
    if sum(processes) != world_size:
        raise MeshError(f"hosts with {', '.join(map(str, processes))} processes do not make {world_size} ranks")
    return [host for host, count in enumerate(processes) for _ in range(count)]


def _order(rank_map: Sequence[int], world_size: int) -> Sequence[int]:
    """The ranks in the order in which roles take them."""
    if rank_map and (rank_map[0] != 0 or sorted(rank_map) != list(range(world_size))):
        raise MeshError(
            f"deployment.rank_map = {list(rank_map)} has to hold each of the ranks 0 to {world_size - 1} once, with 0, "
            "which orchestrates, as the first; leave it empty for roles in the order of ranks"
        )
    return rank_map or range(world_size)


def _runs(ranks: Sequence[int]) -> str:
    """1-4,7: ranks in their order, neighbours in one."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _span(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_runs(ranks)}"
