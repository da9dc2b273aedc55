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
    impl = c.trainer.model.impl
    if impl in NOT_OURS:
        yield (
            f"trainer.router_replay with trainer.model.impl = {impl}: the choices of {NOT_OURS[impl]} routers can't be "
            "forced; set impl = custom or auto"
        )
