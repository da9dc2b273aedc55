"""Make a tiny random model with the byte tokenizer, a folder in Hugging Face format that needs no download.

    python tools/make_tiny.py --out outputs/tiny --seed 0 --layers 4 --hidden 256
    python tools/make_tiny.py --out outputs/tiny-moe --architecture qwen3_moe --experts 8

The defaults are the quickstart's model: 0.4 million parameters, small enough to learn on a laptop in a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro


def main(
    out: Path,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    ff: int = 384,
    tied: bool = False,
    init_std: float = 0.02,
    architecture: Literal["qwen3", "llama", "qwen3_moe", "qwen2_moe"] = "qwen3",
    experts: int = 8,
    top_k: int = 2,
    expert_ff: int = 128,
) -> None:
    """Write a tiny random model and its byte tokenizer.

    Args:
        out: the folder to write; made if absent, files of an earlier model in it are replaced
        seed: the weights are a function of it and of the sizes
        layers: transformer blocks
        hidden: width of the residual stream
        heads: query heads
        kv_heads: key and value heads; must divide heads
        head_dim: width of one head
        ff: width of the MLP
        tied: input and output embedding are one matrix
        init_std: standard deviation of the random weights
        architecture: the family
        experts: of each layer, in families that have them
        top_k: how many of them a token takes
        expert_ff: width of one expert
    """
    # Imported here: `--help` needs no torch.
    from spmd_rl.models import byte_tokenizer
    from spmd_rl.models.tiny import make_tiny

    byte_tokenizer.make_byte_tokenizer(out)
    make_tiny(
        str(out),
        seed=seed,
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ff=ff,
        tied=tied,
        init_std=init_std,
        architecture=architecture,
        experts=experts,
        top_k=top_k,
        expert_ff=expert_ff,
        eos_token_id=byte_tokenizer.EOS_ID,
        pad_token_id=byte_tokenizer.PAD_ID,
    )
    print(f"wrote a {architecture} with {layers} layers, hidden size {hidden} and seed {seed} into {out}")


if __name__ == "__main__":
    tyro.cli(main)
