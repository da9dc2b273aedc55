"""What `trainer.router_replay` can't be combined with, and what needs it, said before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from spmd_rl.config.tree import Config

NOT_OURS = {"hf": "transformers'", "titan": "torchtitan's"}  # trainer.model.impl: whose models these are


def check_replay(c: Config) -> Iterator[str]:
    """Problems, each with its way out."""
    if c.trainer.moe.bias_rate and not c.trainer.router_replay:
        yield (
            f"trainer.moe.bias_rate = {c.trainer.moe.bias_rate} without trainer.router_replay: engines know nothing of "
            "the selection bias and take other experts than the trainer; turn router_replay on, or use "
            "trainer.moe.sequence_coef"
        )
    if not c.trainer.router_replay:
        return
    if c.deployment.placement == "colocated":
        yield (
            "trainer.router_replay with deployment.placement = colocated: routed experts travel between ranks, and "
            "there is no way for them inside one; set placement = disaggregated, or leave router_replay off"
        )
    impl = c.trainer.model.impl
    if impl in NOT_OURS:
        yield (
            f"trainer.router_replay with trainer.model.impl = {impl}: the choices of {NOT_OURS[impl]} routers can't be "
            "forced; set impl = custom or auto"
        )
    if c.clock.mode == "lockstep" and c.ckpt.interval:
        yield (
            f"trainer.router_replay with clock.mode = lockstep and ckpt.interval = {c.ckpt.interval}: engines' routed "
            "experts are not in checkpoints, so that a resumed run would not be equal; set ckpt.interval = 0, or "
            "clock.mode = free"
        )
