"""The whole configuration, as one tree of frozen dataclasses.

Every field has its unit in its name or in its comment, and a default that a laptop can run. The tree is data: it
refuses to know about TOML, the command line, torch or the mesh. Reading it is `load.py`; relations between
fields (what must divide what) are `check.py`; how ranks are laid out is `spmd_rl.world.mesh`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from spmd_rl.config.bench import BenchConfig
from spmd_rl.config.slurm import SlurmConfig
from spmd_rl.config.tasks import EvalConfig, GenerateConfig, SamplingConfig, ServeConfig, SourceConfig


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    name: str = ""  # a local folder in Hugging Face format, or a Hub id
    tokenizer: str = ""  # folder or Hub id; empty: the model's own
    from_rank_0: bool = False  # hosts that lack a local folder named here get it from rank 0's host at start


@dataclass(frozen=True)
class TrainerModelConfig:
    """How the trainer holds and computes the model."""

    # custom: spmd_rl.models; hf: any AutoModelForCausalLM; titan: torchtitan's families; auto: custom, else hf
    impl: Literal["auto", "custom", "hf", "titan"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"  # compute and wire; bfloat16 keeps float32 master weights
    attn: Literal["auto", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4"] = "auto"
    lm_head_chunk: int = 1024  # tokens per chunk of the LM head; no [tokens, vocab] tensor is ever larger


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and gradient clipping."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_norm: float = 1.0  # clip the global gradient norm; 0 = never


@dataclass(frozen=True)
class SchedulerConfig:
    """Learning rate over optimizer steps: linear warm-up, then constant, or decay to `min_lr`."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0  # steps from the end of warm-up to min_lr (linear, cosine); 0 = until max_steps
    min_lr: float = 0.0


@dataclass(frozen=True)
class ParallelConfig:
    """How the trainer ranks share a model: dp_replicate × dp_shard × cp of them, where dp_shard is what is left.

    docs/parallelism.md says what each costs, and how to choose.
    """

    dp_replicate: int = 1  # copies of the sharded model (HSDP); only gradients travel between them
    nodes_per_fsdp_group: int = 0  # hosts that hold one copy together, from which dp_replicate follows; 0 = as it says
    cp: int = 1  # ranks that share every row (context parallelism)
    cp_style: Literal["ulysses", "ring"] = "ulysses"  # ulysses: heads are divided, cp divides them; ring: any cp
    ep: int = 1  # ranks that share the experts, inside dp_shard × cp; 0 = as many as divide and fit on one host
    ep_comm_backend: Literal["torch", "deepep"] = "torch"  # deepep: fused kernels for bfloat16 on GPUs, from SM90 on
    deepep_num_sms: int = 0  # multiprocessors that communicate; 0 = as many as deepep thinks best
    deepep_token_chunk_size: int = 0  # tokens that a rank dispatches at once: sizes the buffer; 0 = a whole row
    reshard_after_forward: bool = True  # the backward gathers a layer's weights again; else they stay: memory for speed


@dataclass(frozen=True)
class MoeConfig:
    """How evenly a model's experts are used. Both are off by default; docs/models.md has the formulas."""

    bias_rate: float = 0.0  # how far each router's selection bias moves per optimizer step; 0 = it has none
    sequence_coef: float = 0.0  # of the sequence-wise balance loss; 0 = off


@dataclass(frozen=True)
class TrainerConfig:
    """The trainer ranks."""

    model: TrainerModelConfig = field(default_factory=TrainerModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    router_replay: bool = False  # experts are those that the engine took when it sampled (R3); gates are the trainer's
    threads: int = 1  # CPU threads per trainer rank; fix it when comparing runs bit by bit


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised steps on the tasks' own teacher before RL starts; its result is policy version 0."""

    steps: int = 0
    batch_size: int = 64  # lessons a step: answers, or demonstrations of several turns
    lessons: int = 0  # different ones, each of which is made once; 0 = a new one every time
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-3))
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(frozen=True)
class ClipConfig:
    """The clipped surrogate of PPO. -1 = as the algorithm has it."""

    low: float = -1.0  # the ratio is clipped below 1 - low
    high: float = -1.0  # and above 1 + high
    dual: float = -1.0  # bound on the ratio where the advantage is negative (dual clip); 0 = off


@dataclass(frozen=True)
class CorrectionConfig:
    """Off-policy corrections by the ratio p / mu of trained and behaviour policy. All that are on apply together.

    -1 = as the algorithm has it, 0 = off. Formulas and sources are in docs/algorithms.md.
    """

    ratio_cap: float = -1.0  # truncated importance sampling by token: min(ratio, cap)
    sequence_cap: float = -1.0  # the same by sequence: min(product of ratios, cap), in place of the token's ratio
    ipo: float = -1.0  # drop tokens with |p - mu| above this
    dppo_tv: float = -1.0  # drop tokens that moved further than this in p, the way their advantage pushes them
    dppo_kl: float = -1.0  # the same by binary KL divergence, in nats
    fallen: float = -1.0  # drop tokens whose p has fallen further than this below mu, whatever their advantage
    icepop_low: float = -1.0  # drop tokens with a ratio below this
    icepop_high: float = -1.0  # drop tokens with a ratio above this
    geometric_low: float = -1.0  # drop sequences whose geometric mean ratio is below this
    geometric_high: float = -1.0  # drop sequences whose geometric mean ratio is above this
    negative_sequence: float = -1.0  # drop sequences of negative advantage with mean log(mu / p) above this, in nats


@dataclass(frozen=True)
class KLConfig:
    """A penalty for leaving the reference model (`algorithm.reference`)."""

    coef: float = 0.0  # 0 = none
    estimator: Literal["k1", "k2", "k3"] = "k3"  # of KL(policy || reference) from the sampled token
    place: Literal["loss", "reward"] = "loss"  # reward: every token's advantage loses the penalties from it on


@dataclass(frozen=True)
class CriticConfig:
    """The critic of `ppo_critic`: a network of its own, of the model's architecture with a scalar head."""

    lr: float = 1e-5
    gamma: float = 1.0  # discount per sampled token
    lam: float = 1.0  # lambda of generalised advantage estimation
    warmup_steps: int = 0  # steps in which only the critic learns


@dataclass(frozen=True)
class AlgorithmConfig:
    """From rewards to the loss: a named algorithm, and what departs from it.

    "auto" and -1 stand for what the algorithm itself has (docs/algorithms.md).
    """

    type: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce_pp",
        "gspo",
        "cispo",
        "ppo",
        "ppo_critic",
        "max_rl",
        "per_agent",
        "hierarchical",
        "echo",
        "opd",
        "opsd",
        "sft",
    ] = "grpo"
    advantage: str = ""  # your own, pkg.mod:function or file.py:function, in place of the algorithm's
    loss: str = ""  # your own policy loss, likewise
    std: Literal["auto", "none", "group", "batch"] = "auto"  # what advantages are divided by
    aggregation: Literal["auto", "token", "sequence", "prompt", "constant"] = "auto"  # what a batch is the mean of
    zero_variance: Literal["auto", "refill", "keep"] = "auto"  # groups of equal rewards: drop and sample others
    max_refill: float = 2.0  # groups dropped per group of the batch at most; beyond, they are kept
    minibatches: int = 1  # optimizer steps that share one batch
    proximal: bool = False  # decoupled PPO: clip around the policy at the start of the batch
    mask_truncated: bool = False  # rollouts that hit a length limit are not trained on
    overlong_buffer: int = -1  # tokens before the limit in which the penalty for length grows; 0 = no penalty
    overlong_penalty: float = 1.0  # taken off the reward at the limit
    length_penalty: float = 0.0  # share of the group's mean reward that its longest rollout loses
    entropy_bonus: float = 0.0
    observation_weight: float = 0.1  # echo: cross-entropy on what the environment said, relative to a sampled token
    baseline_decay: float = 0.95  # per_agent: of the moving average of rewards
    episode_agent: str = "solver"  # hierarchical: this agent's samples are compared within their episode
    reference: str = ""  # frozen model of kl, opd (the teacher) and sft; empty: the policy that RL starts from
    clip: ClipConfig = field(default_factory=ClipConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)


@dataclass(frozen=True)
class OrchestratorConfig:
    """Rank 0: what is sampled, how stale it may be, what one optimizer step consumes."""

    batch_size: int = 64  # what one step consumes, in `batch_unit`
    batch_unit: Literal["rollouts", "groups", "tokens"] = "rollouts"  # tokens: sampled ones, at least so many
    max_batch_groups: int = 64  # groups per step at most where the unit is tokens
    group_size: int = 8  # rollouts per task; divides a batch_size in rollouts
    max_lag: int = 1  # S of the window: how many optimizer steps rollouts may run ahead; 0 = synchronous
    order: Literal["fifo", "window", "completion"] = "window"
    window_fraction: float = 0.3  # f of the window: the share of open groups from which a batch may be filled
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    source: tuple[SourceConfig, ...] = (SourceConfig(env="reverse"),)
    eval: EvalConfig = field(default_factory=EvalConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    max_token_lag: int = 0  # sampled tokens older than so many optimizer steps are not trained on; 0 = all are
    max_off_policy_steps: int = 0  # rollouts that run for more optimizer steps than that are dropped; 0 = never
    max_retries: int = 1  # how often a rollout that failed is tried again
    max_error_rate: float = 0.2  # the run stops when more than this share of recent rollouts failed
    reward_gate: tuple[float, float] = (0.0, 0.0)  # groups with a mean reward outside are replaced; equal = off
    shuffle_rewards: bool = False  # a control: rewards are permuted inside each batch, so nothing may be learned

    @property
    def groups_per_batch(self) -> int:
        """Groups that one step consumes; at most, where batches are counted in tokens."""
        if self.batch_unit == "rollouts":
            return self.batch_size // self.group_size
        return self.batch_size if self.batch_unit == "groups" else self.max_batch_groups


@dataclass(frozen=True)
class InferenceConfig:
    """The inference ranks."""

    tp: int = 1  # tensor-parallel ranks per replica
    expert_parallel: bool = False  # a replica's ranks hold experts / tp whole experts each, not a slice of each one
    threads: int = 1  # CPU threads per inference rank
    vllm: dict[str, Any] = field(default_factory=dict)  # passed through to vLLM's EngineArgs


@dataclass(frozen=True)
class DeploymentConfig:
    """Ranks to roles. Rank 0 orchestrates; trainer ranks follow, then inference ranks. 0 = derived."""

    placement: Literal["disaggregated", "colocated"] = "disaggregated"  # colocated: the same ranks train and infer
    # own: a process without accelerator, so that none idles for rank 0; shared: a thread beside rank 0's other role;
    # auto: own where node 0 starts a process more than it has accelerators, or has none.
    orchestrator: Literal["auto", "own", "shared"] = "auto"
    release_memory: bool = True  # colocated: the engine gives its KV cache and weights back while the trainer works
    train_ranks: int = 0  # 0 = what inference leaves; both 0 = half of the ranks after rank 0, rounded down
    infer_ranks: int = 0  # a multiple of inference.tp
    teacher_ranks: int = 0  # engines that serve algorithm.reference and sample for type = sft; a multiple of tp
    rank_map: tuple[int, ...] = ()  # all ranks, 0 first, in the order in which roles take them; empty: as they come
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True)
class WeightsConfig:
    """How new weights travel from the trainer ranks to the inference ranks, and how that is checked."""

    bucket_mb: float = 32.0  # MiB per bucket; the unit of sending, of the checksum and of overlap
    probe_sequences: int = 8  # sequences that both sides score after every pull; 0 = no probe
    probe_length: int = 24  # tokens per probe sequence at most
    max_k3: float = 0.0  # limit of the same-version mismatch; 0 = 1e-8 in float32, 1e-2 in bfloat16
    strict: bool = False  # above the limit: stop instead of warning
    mode: Literal["in_flight", "drain", "recompute"] = "in_flight"  # what happens to requests while weights are swapped
    # What an inference rank has room for besides its own weights: whole = a second copy of the model, received while
    # the engine steps; buckets = two buckets, of which all but the first two travel while the engine stands still.
    staging: Literal["whole", "buckets"] = "whole"


@dataclass(frozen=True)
class ClockConfig:
    """The exchange between rank 0 and the leaders.

    free: as fast as everybody can. lockstep: what happens when is counted in ticks, not in time, so that two runs of
    one config are equal bit for bit; whoever is early waits.
    """

    mode: Literal["free", "lockstep"] = "free"
    period_ms: float = 20.0  # free: a tick starts at once when there are decisions, else after this time
    steps_per_tick: int = 8  # lockstep: engine steps, idle ones counted
    train_ticks: int = 4  # lockstep: how long an optimizer step takes


@dataclass(frozen=True)
class DeadlineConfig:
    """No wait is for ever. A rank that misses one ends the whole run with its name, host and stage."""

    heartbeat_s: float = 30.0  # a process that shows no sign of life for this long is dead
    start_s: float = 600.0  # building the model or the engine, including compilation
    step_s: float = 1800.0  # one optimizer step, one weight pull, one engine step
    stall_s: float = 1800.0  # rank 0 without any progress at all: no rollout, no step, no pull
    env_s: float = 600.0  # one rollout, from its first request to its reward
    collective_s: float = 7200.0  # time-out of the process groups: longer than all others, for it names nobody


@dataclass(frozen=True)
class CkptConfig:
    """What is saved, and where a run goes on."""

    export_interval: int = 0  # optimizer steps between Hugging Face exports; 0 = only at the end
    interval: int = 0  # optimizer steps between checkpoints (weights, optimizer, place in the data); 0 = none
    keep: int = 2  # newest checkpoints that stay; 0 = all
    keep_every: int = 0  # checkpoints of steps that this divides stay for ever; 0 = none
    resume: str = ""  # a checkpoint's folder, or "latest" of output_dir
    per_node: bool = False  # where hosts share no output_dir, each keeps its own part of every checkpoint


@dataclass(frozen=True)
class DataConfig:
    """What `main.py sft` trains on: a dataset of chats or of prompts and completions."""

    type: Literal["table", "fake"] = "table"  # fake: random tokens, for measuring
    name: str = ""  # *.jsonl, *.parquet (a folder, a pattern) or a Hub dataset id
    split: str = "train"  # of a Hub dataset
    messages: str = "messages"  # column of chat messages, rendered by the tokenizer's chat template
    tools: str = ""  # column of the tools that a chat may call
    prompt: str = ""  # column of plain text, in place of messages
    completion: str = ""  # column of what follows the prompt; the end token is added
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"  # which turns are learned
    batch_size: int = 64  # sequences per optimizer step, over all ranks
    too_long: Literal["error", "drop", "truncate"] = "error"  # sequences above seq_len
    validation: str = ""  # a dataset, or the name of the Hub dataset's split
    validation_share: float = 0.0  # of the rows, kept from training where `validation` is empty
    eval_interval: int = 0  # optimizer steps between validations; 0 = only at the start and at the end
    fake_length: int = 256  # tokens per sequence
    fake_min_length: int = 0  # with a value, lengths are spread evenly from here to fake_length


@dataclass(frozen=True)
class GuardConfig:
    """What happens when a run of RL falls apart, and when that is so (spmd_rl/orchestrator/guard.py)."""

    on_collapse: Literal["warn", "stop", "rollback"] = "warn"  # rollback: to the last checkpoint that was good
    window: int = 10  # steps; medians over so many are compared
    reward_drop: float = 0.5  # share of its best that the reward must have lost
    entropy_factor: float = 8.0  # how many times more, or less, than at first the entropy must be
    norm_factor: float = 20.0  # how many times their usual size gradient norm or off-policy KL must be
    max_rollbacks: int = 2  # then the run stops


@dataclass(frozen=True)
class LogConfig:
    """What is written beside metrics.jsonl."""

    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "spmd_rl"
    timeline: bool = True  # the phases of every rank, the first 50,000 of each start: timeline.png, timeline/trace.json
    rollouts_per_step: int = 4  # readable samples per step in rollouts/; 0 = none
    progress: Literal["auto", "live", "plain", "off"] = "auto"  # auto: live on a terminal, plain lines elsewhere
    console_ranks: tuple[int, ...] = (0,)  # whose output the screen shows, beside logs/rank_*.log


@dataclass(frozen=True)
class Config:
    """One run."""

    output_dir: str = "outputs/run"
    max_steps: int = 100  # optimizer steps of RL
    seq_len: int = 2048  # tokens in one packed row, and the longest sequence the engine serves
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    clock: ClockConfig = field(default_factory=ClockConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)
    ckpt: CkptConfig = field(default_factory=CkptConfig)
    data: DataConfig = field(default_factory=DataConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    log: LogConfig = field(default_factory=LogConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
