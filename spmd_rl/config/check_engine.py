"""Checks of the engines' part of a config: what vLLM may be told, and how many ranks a replica takes.

It refuses to know what vLLM makes of the arguments that go through.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmd_rl.config.tree import Config

# vLLM's arguments that follow from keys of this tree: a second place to set them could only disagree with the first.
ENGINE_ARGS_ELSEWHERE = {
    "model": "model.name",
    "model_weights": "model.name",
    "tokenizer": "model.tokenizer",
    "dtype": "trainer.model.dtype",
    "seed": "seed",
    "max_model_len": "seq_len",
    "tensor_parallel_size": "inference.tp",
    "enable_expert_parallel": "inference.expert_parallel",
    "device_ids": "deployment.device",
    "enable_return_routed_experts": "trainer.router_replay",
}

# vLLM's arguments that have only one right value here.
ENGINE_ARGS_FIXED = {
    "logprobs_mode": "the loss needs the logprobs of the distribution that was sampled (processed_logprobs)",
    "distributed_executor_backend": "torchrun has started the ranks already (external_launcher)",
    "worker_cls": "the engine's workers are driven from inside the program",
    "worker_extension_cls": "the engine's workers are driven from inside the program",
    "skip_tokenizer_init": "the engine sees token ids only",
    "scheduling_policy": "older rollouts go first, which is what bounds their age",
    "async_scheduling": "the policy version of a token must be known when its step returns",
    "pipeline_parallel_size": "a replica is tensor parallel only; see inference.tp",
    "prefill_context_parallel_size": "a replica is tensor parallel only; see inference.tp",
    "enable_eplb": "new weights of an expert go to the one rank that holds it",
    "expert_placement_strategy": "new weights of an expert go to the one rank that holds it",
    "nnodes": "torchrun lays out the nodes",
    "node_rank": "torchrun lays out the nodes",
    "master_addr": "torchrun lays out the nodes",
    "master_port": "torchrun lays out the nodes",
}


def engine_problems(c: Config) -> Iterator[str]:
    """What cannot work about [inference] and the ranks it takes."""
    for key, value in c.inference.vllm.items():
        name = key.replace("-", "_")
        if name in ENGINE_ARGS_ELSEWHERE:
            yield f"inference.vllm.{key} = {value}: is set by {ENGINE_ARGS_ELSEWHERE[name]}; set that instead"
        elif name in ENGINE_ARGS_FIXED:
            yield f"inference.vllm.{key} = {value}: cannot be chosen, {ENGINE_ARGS_FIXED[name]}; remove it"
        elif name.startswith("data_parallel_"):
            yield (
                f"inference.vllm.{key} = {value}: cannot be chosen, the number of replicas is deployment.infer_ranks "
                "divided by inference.tp; remove it"
            )
        elif name != key:
            yield f"inference.vllm.{key}: vLLM's arguments are spelled with underscores; write {name}"
    infer_ranks, tp = c.deployment.infer_ranks, c.inference.tp
    if tp >= 1 and infer_ranks % tp:
        yield (
            f"deployment.infer_ranks = {infer_ranks} is not a multiple of inference.tp = {tp}: every replica takes tp "
            f"ranks; set infer_ranks to {max(tp, infer_ranks - infer_ranks % tp)}, or another tp"
        )
    if c.inference.expert_parallel and tp == 1:
        yield (
            "inference.expert_parallel = true divides experts over the inference.tp ranks of a replica, and there is "
            "one: raise inference.tp, or leave it out"
        )
