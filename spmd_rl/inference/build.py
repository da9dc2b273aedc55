"""Build vLLM as a guest in our world: one in-process engine per inference rank, a replica's ranks as its whole world.

vLLM takes the default process group for its own, so the replica's group is the default one only while it is being
built. What is set for the CPU only (eager, no dynamo, KV-cache size, shared-memory names) is in one place here.

Patch list (checked on vLLM 0.30.0): `_CPUSHMDistributed.make_group_name` (tensor parallel on the CPU): vLLM names
its shared memory alike for every run and every replica, so a second run or replica would not start; ours
carries the master port and the replica, and the segment is unlinked as soon as all ranks have mapped it.
"""

from __future__ import annotations

import glob
import os
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.config.tree import Config
from spmd_rl.inference import local_experts, noise
from spmd_rl.models.hf_config import read_config
from spmd_rl.world.groups import as_default


def prepare_environment(device: torch.device) -> None:
    """What vLLM reads from the environment; must run before its first import."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is a guest in this process, not a child of it
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device.type == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM's own default takes half of the machine
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first generation compiles for 16 s
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the folder is resolved by us; vLLM must not ask a hub


def build_engine(
    config: Config, folder: str, group: dist.ProcessGroup, replica: int, local_rank: int, device: torch.device
) -> Any:
    """The `LLMEngine` of this rank, with the weights of `folder` and our sampling noise.

    Args:
        folder: model in Hugging Face format.
        group: this replica's group; its size is the tensor-parallel degree.
        local_rank: which accelerator of this host the rank uses.
    """
    prepare_environment(device)
    with as_default(group, local_rank if device.type == "cuda" else None):
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        prefix = f"spmd_rl_{os.environ['MASTER_PORT']}_{replica}_"
        if device.type == "cpu" and group.size() > 1:
            _name_shared_memory(prefix)
        if device.type == "cpu" and config.inference.expert_parallel:
            local_experts.install()
        engine = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(config, folder, device)))
        if device.type == "cpu" and group.size() > 1:
            _unlink_shared_memory(prefix, group)
    noise.install(model_runner(engine))
    return engine


def engine_arguments(config: Config, folder: str, device: torch.device) -> dict[str, Any]:
    """Everything vLLM is told: what spmd_rl owns, then the user's `inference.vllm` on top of our defaults."""
    defaults: dict[str, Any] = {
        "enforce_eager": device.type == "cpu",
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "enable_sleep_mode": device.type == "cuda" and sleeps(config),
        "block_size": 32 if device.type == "cpu" else None,  # the CPU's default of 128 would cache no short prefix
    }
    if device.type == "cpu" and "kv_lora_rank" in read_config(folder):
        # vLLM's rotary kernel for the CPU takes the slices of latent attention for whole tensors, and turns others.
        defaults["compilation_config"] = {"custom_ops": ["none"]}
    owned = {
        "model": folder,
        "dtype": config.trainer.model.dtype,
        "max_model_len": config.seq_len,
        "tensor_parallel_size": config.inference.tp,
        "enable_expert_parallel": config.inference.expert_parallel,
        "distributed_executor_backend": "external_launcher",
        "seed": config.seed,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "async_scheduling": False,  # a token's policy version must be known when the step returns
        "enable_return_routed_experts": config.trainer.router_replay,
    }
    arguments = {**defaults, **config.inference.vllm, **owned}
    return {name: value for name, value in arguments.items() if value is not None}


def sleeps(config: Config) -> bool:
    """Whether the engine gives its memory back while others use its device."""
    return config.deployment.placement == "colocated" and config.deployment.release_memory


def model_runner(engine: Any) -> Any:
    """The runner of this rank: the model, its batch and its sampler."""
    return engine.model_executor.driver_worker.worker.model_runner


def _name_shared_memory(prefix: str) -> None:
    from vllm.distributed.device_communicators import cpu_communicator

    def make_group_name(communicator: Any) -> str:
        return prefix + communicator.unique_name.replace(":", "_")

    cpu_communicator._CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


def _unlink_shared_memory(prefix: str, group: dist.ProcessGroup) -> None:
    dist.barrier(group=group)  # all ranks have mapped it
    for path in glob.glob(f"/dev/shm/*{prefix}*"):
        with suppress(FileNotFoundError):
            os.unlink(path)
