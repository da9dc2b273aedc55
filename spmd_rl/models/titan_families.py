"""From Hugging Face's config.json to torchtitan's configs, one family at a time.

A family says which fields have just one value that torchtitan can compute, how the others become its config, and what
its parameters are called in checkpoints. Nothing is guessed: a field that a family does not know how to express is
refused by name. It refuses to know files, devices and ranks.

This module imports torchtitan (the extra `titan`), so it is itself imported only where `trainer.model.impl = titan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, FeedForward, Linear, RMSNorm, RoPE
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model, DeepSeekV3TransformerBlock
from torchtitan.models.gpt_oss.model import Attention as SinkAttention
from torchtitan.models.gpt_oss.model import GptOssModel, GptOssTransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

from spmd_rl.models.conversion import Stacked
from spmd_rl.models.titan_layers import ClampedExperts, Experts, Gate, PackedAttention

LATENT_EPS = 1e-6  # of the norms of DeepSeek's latents in Hugging Face's model, whatever rms_norm_eps is
UNUSED_RATE = 1e-3  # of balancing by the bias, which torchtitan's optimizer would do; here it makes the bias exist


@dataclass(frozen=True)
class TitanFamily:
    """What the models of one `model_type` are made of. `config` is their transformers config."""

    model_type: str
    translate: Callable[[Any, str], Decoder.Config]  # (config, attention back end)
    problem: Callable[[Any], str | None]  # what torchtitan can't express, in terms of fields; None: nothing
    names: Mapping[str, str]  # modules and parameters of a layer: torchtitan's, Hugging Face's
    only: Mapping[str, Any] = field(default_factory=dict)  # fields with one value that can be expressed
    stacked: tuple[Stacked, ...] = ()  # `ours` is what `names` makes of it

    def unsupported(self, config: Any) -> str | None:
        """The field that torchtitan's model can't express, and what it could; None where there is none."""
        for name, value in (ONLY | dict(self.only)).items():
            given = getattr(config, name, None)
            if given is not None and given != value:
                return f"{name} = {given!r} (it has {value!r})"
        if getattr(config, "quantization_config", None):
            return "quantization_config (dequantise the weights first)"
        return self.problem(config)


ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
COMMON = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
GROUPED = {f"attention.qkv_linear.w{letter}": f"self_attn.{letter}_proj" for letter in "qkv"}


def linear(inputs: int, outputs: int, bias: bool = False) -> Linear.Config:
    """A linear layer."""
    return Linear.Config(in_features=inputs, out_features=outputs, bias=bias)


def norm(width: int, eps: float) -> RMSNorm.Config:
    """A root-mean-square norm."""
    return RMSNorm.Config(normalized_shape=width, eps=eps)


def swiglu(width: int, hidden: int) -> FeedForward.Config:
    """A dense feed-forward layer."""
    return FeedForward.Config(w1=linear(width, hidden), w2=linear(hidden, width), w3=linear(width, hidden))


def around(config: Any) -> dict[str, Any]:
    """Embedding, final norm and head, which are alike in all families."""
    width, words = config.hidden_size, config.vocab_size
    return {
        "dim": width,
        "vocab_size": words,
        "tok_embeddings": Embedding.Config(num_embeddings=words, embedding_dim=width),
        "norm": norm(width, config.rms_norm_eps),
        "lm_head": linear(width, words),
    }


def norms(config: Any) -> dict[str, RMSNorm.Config]:
    """The two of a layer."""
    both = norm(config.hidden_size, config.rms_norm_eps)
    return {"attention_norm": both, "ffn_norm": both}


def rope(config: Any, kind: type[RoPE], width: int) -> RoPE.Config:
    """Rotary positions of type default or yarn; attention factors are the caller's."""
    given = config.rope_parameters
    common = {"dim": width, "max_seq_len": config.max_position_embeddings, "theta": given["rope_theta"]}
    if given["rope_type"] == "default":
        return kind.Config(**common)
    return kind.Config(
        **common,
        scaling="yarn",
        rope_factor=given["factor"],
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        original_seq_len=given.get("original_max_position_embeddings") or config.max_position_embeddings,
        truncate=given.get("truncate", True),
    )


def rope_problem(config: Any, types: tuple[str, ...]) -> str | None:
    """What of the rotary positions `rope` can't express."""
    given = config.rope_parameters
    if given["rope_type"] not in types:
        return f"rope_parameters.rope_type = {given['rope_type']!r} (it has {', '.join(types)})"
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rope_parameters.partial_rotary_factor = {given['partial_rotary_factor']} (it has 1.0)"
    return None


# ---- deepseek_v3: multi-head latent attention, dense layers first, shared experts, a selection bias


def latent_attention(config: Any, backend: str) -> LatentAttention.Config:
    """Queries and keys of a part without positions and a rotary one; keys and values from one latent."""
    width, heads = config.hidden_size, config.num_attention_heads
    turned, latent = config.qk_rope_head_dim, config.kv_lora_rank
    key = config.qk_nope_head_dim + turned
    rank = config.q_lora_rank or 0
    queries = (
        {"wq_a": linear(width, rank), "wq_b": linear(rank, heads * key)} if rank else {"wq": linear(width, heads * key)}
    )
    return LatentAttention.Config(
        dim=width,
        n_heads=heads,
        q_lora_rank=rank,
        kv_lora_rank=latent,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=turned,
        v_head_dim=config.v_head_dim,
        mscale=config.rope_parameters.get("mscale_all_dim") or 0.0,
        **queries,
        q_norm=norm(rank or 1, LATENT_EPS),
        wkv_a=linear(width, latent + turned),
        kv_norm=norm(latent, LATENT_EPS),
        wkv_b=linear(latent, heads * (config.qk_nope_head_dim + config.v_head_dim)),
        wo=linear(heads * config.v_head_dim, width),
        rope=rope(config, ComplexRoPE if config.rope_interleave else CosSinRoPE, turned),
        inner_attention=PackedAttention.Config(backend=backend),
    )


def latent_experts(config: Any) -> MoE.Config:
    """Sigmoid scores, the best groups of experts, and experts that every token goes to."""
    width, hidden, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    groups = {"num_expert_groups": config.n_group, "num_limited_groups": config.topk_group}
    return MoE.Config(
        num_experts=experts,
        load_balance_coeff=UNUSED_RATE,
        router=TokenChoiceTopKRouter.Config(
            num_experts=experts,
            gate=Gate.Config(in_features=width, out_features=experts),
            top_k=config.num_experts_per_tok,
            score_func="sigmoid",
            route_norm=bool(config.norm_topk_prob),
            route_scale=config.routed_scaling_factor,
            **(groups if (config.n_group or 1) > 1 else {}),
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=Experts.Config(dim=width, hidden_dim=hidden, num_experts=experts),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=experts, top_k=config.num_experts_per_tok),
        ),
        shared_experts=swiglu(width, hidden * config.n_shared_experts) if config.n_shared_experts else None,
    )


def deepseek_v3(config: Any, backend: str) -> Decoder.Config:
    """The whole model, without the layers that predict further tokens."""
    layers = [
        DeepSeekV3TransformerBlock.Config(
            attention=latent_attention(config, backend),
            **norms(config),
            **(
                {"feed_forward": swiglu(config.hidden_size, config.intermediate_size)}
                if layer < config.first_k_dense_replace
                else {"moe": latent_experts(config)}
            ),
        )
        for layer in range(config.num_hidden_layers)
    ]
    return DeepSeekV3Model.Config(**around(config), layers=layers)


def deepseek_v3_problem(config: Any) -> str | None:
    """Attention factors that would scale the rotary part alone; groups that leave nothing to choose."""
    if config.num_key_value_heads != config.num_attention_heads:
        return f"num_key_value_heads = {config.num_key_value_heads} (it has num_attention_heads)"
    if (config.n_group or 1) > 1 and config.n_routed_experts // config.n_group < 2:
        return f"n_group = {config.n_group} with n_routed_experts = {config.n_routed_experts} (groups have at least 2)"
    given = config.rope_parameters
    if given["rope_type"] == "yarn" and given.get("attention_factor") != 1.0:
        same = given.get("mscale") and given.get("mscale") == given.get("mscale_all_dim")
        if not same or given.get("attention_factor"):
            names = ("mscale", "mscale_all_dim", "attention_factor")
            said = ", ".join(f"rope_parameters.{name} = {given.get(name)}" for name in names)
            return f"{said} (it scales all of a query alike: mscale = mscale_all_dim, without attention_factor)"
    return rope_problem(config, ("default", "yarn"))


DEEPSEEK_V3 = TitanFamily(
    "deepseek_v3",
    deepseek_v3,
    deepseek_v3_problem,
    names=COMMON
    | {
        "attention.wq": "self_attn.q_proj",
        "attention.wq_a": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.wq_b": "self_attn.q_b_proj",
        "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
        "moe.router.gate": "mlp.gate",
        "moe.expert_bias_E": "mlp.gate.e_score_correction_bias",
        "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
        "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
        "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
        "moe.routed_experts.inner_experts": "mlp.experts",
    },
    only={"attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    stacked=(
        Stacked("mlp.experts.w1_EFD", ("mlp.experts.{e}.gate_proj.weight",)),
        Stacked("mlp.experts.w3_EFD", ("mlp.experts.{e}.up_proj.weight",)),
        Stacked("mlp.experts.w2_EDF", ("mlp.experts.{e}.down_proj.weight",)),
    ),
)


# ---- gpt_oss: windows in every other layer, a sink per head, biases everywhere


def sink_attention(config: Any, layer: int) -> SinkAttention.Config:
    """Grouped queries; `layer_types` says which layers see a window only."""
    width, head = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
    return SinkAttention.Config(
        dim=width,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head,
        qkv_linear=QKVLinear.Config(
            head_dim=head, wq=linear(width, heads * head, bias=True), wkv=linear(width, kv_heads * head, bias=True)
        ),
        wo=linear(heads * head, width, bias=True),
        sliding_window_size=window,
        rope=rope(config, CosSinRoPE, head),
        inner_attention=PackedAttention.Config(window=window),
    )


def sink_experts(config: Any) -> MoE.Config:
    """The softmax of all scores, divided by the sum of those taken, is the softmax of those taken."""
    width, experts = config.hidden_size, config.num_local_experts
    return MoE.Config(
        num_experts=experts,
        load_balance_coeff=None,
        router=TokenChoiceTopKRouter.Config(
            num_experts=experts,
            gate=Gate.Config(in_features=width, out_features=experts, bias=True),
            top_k=config.num_experts_per_tok,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=ClampedExperts.Config(
                dim=width,
                hidden_dim=config.intermediate_size,
                num_experts=experts,
                alpha=config.swiglu_alpha,
                limit=config.swiglu_limit,
            ),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=experts, top_k=config.num_experts_per_tok),
        ),
    )


def gpt_oss(config: Any, backend: str) -> Decoder.Config:
    """The whole model; its attention is plain torch, whatever the back end."""
    layers = [
        GptOssTransformerBlock.Config(
            attention=sink_attention(config, layer), **norms(config), moe=sink_experts(config)
        )
        for layer in range(config.num_hidden_layers)
    ]
    return GptOssModel.Config(**around(config), layers=layers)


def gpt_oss_problem(config: Any) -> str | None:
    """Attention factors of yarn other than the usual one."""
    given = config.rope_parameters
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if given.get(name) is not None:
            return f"rope_parameters.{name} = {given[name]} (it has that of the factor)"
    return rope_problem(config, ("default", "yarn"))


GPT_OSS = TitanFamily(
    "gpt_oss",
    gpt_oss,
    gpt_oss_problem,
    names=COMMON
    | GROUPED
    | {
        "attention.sinks": "self_attn.sinks",
        "moe.router.gate": "mlp.router",
        "moe.routed_experts.inner_experts": "mlp.experts",
    },
    only={"attention_bias": True},
)


# ---- qwen3: our own definition is there too, and faster; this one is for comparisons


def qwen3(config: Any, backend: str) -> Decoder.Config:
    """The whole dense model."""
    width, head = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = GQAttention.Config(
        dim=width,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head,
        qkv_linear=QKVLinear.Config(head_dim=head, wq=linear(width, heads * head), wkv=linear(width, kv_heads * head)),
        wo=linear(heads * head, width),
        qk_norm=norm(head, config.rms_norm_eps),
        rope=rope(config, CosSinRoPE, head),
        inner_attention=PackedAttention.Config(backend=backend),
    )
    layer = Qwen3TransformerBlock.Config(
        attention=attention, **norms(config), feed_forward=swiglu(width, config.intermediate_size)
    )
    return Qwen3Model.Config(**around(config), layers=[layer] * config.num_hidden_layers)


def qwen3_problem(config: Any) -> str | None:
    """Windows, and yarn, whose attention factor torchtitan's qwen3 does not know."""
    if "sliding_attention" in (config.layer_types or ()):
        return "layer_types with sliding_attention (it has full_attention)"
    return rope_problem(config, ("default",))


QWEN3 = TitanFamily(
    "qwen3",
    qwen3,
    qwen3_problem,
    names=COMMON | GROUPED | {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"},
    only={"attention_bias": False},
)

FAMILIES: dict[str, TitanFamily] = {family.model_type: family for family in (DEEPSEEK_V3, GPT_OSS, QWEN3)}
