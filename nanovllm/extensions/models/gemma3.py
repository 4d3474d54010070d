"""Gemma 3 (text): most layers attend to a window of tokens, what is added to the residual is normalised
first, and embeddings are scaled.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanovllm.extensions.models.config import DecoderConfig
from nanovllm.extensions.models.facts import LAYER_MODULES, Facts, Fields, GGUFFacts
from nanovllm.extensions.models.gelu import GeluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.residual_stream import Stream
from nanovllm.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from nanovllm.utils.loader import default_weight_loader


class Gemma3DecoderLayer(Qwen3DecoderLayer):
    """What attention and the MLP compute goes through a norm of its own before it is added."""

    def __init__(self, config: DecoderConfig, *parts: torch.nn.Module):
        super().__init__(config, *parts)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.act_fn = GeluAndMul()

    def forward(self, positions: torch.Tensor, stream: Stream, next_norm: RMSNorm) -> Stream:
        attention = self.self_attn
        mlp = self.mlp
        mlp_norm = self.pre_feedforward_layernorm
        attended = attention.attend(positions, attention.qkv_proj(stream))
        stream = add_normed(attention.o_proj, stream, attended, self.post_attention_layernorm, mlp_norm)
        activated = self.act_fn(mlp.gate_up_proj(stream))
        return add_normed(mlp.down_proj, stream, activated, self.post_feedforward_layernorm, next_norm)


def add_normed(
    layer: RowParallelLinear, stream: Stream, x: torch.Tensor, own_norm: RMSNorm, next_norm: RMSNorm
) -> Stream:
    """`RowParallelLinear.add_to`, but the product goes through a norm of its own before it is added."""
    bias = layer.bias if layer.group.rank == 0 else None
    product = layer.product(len(stream.x))
    y = layer.group.all_reduce(product.linear(x, bias))
    return Stream(stream.residual() + own_norm(y), next_norm)


class Gemma3ForCausalLM(Qwen3ForCausalLM):
    layer_class = Gemma3DecoderLayer

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        embedding = self.model.embed_tokens
        scale = torch.tensor(config.hidden_size**0.5, dtype=embedding.weight.dtype, device="cpu").item()
        embedding.register_forward_hook(lambda _module, _args, embedded: embedded * scale)
        for norm in self.modules():
            if isinstance(norm, RMSNorm):
                store_less_one(norm)


def store_less_one(norm: RMSNorm) -> None:
    """
    Say that checkpoints have the weight less 1. It is kept in float32: beside the 1 bfloat16 would lose most
    of what they have.
    """
    norm.weight = nn.Parameter(norm.weight.float(), requires_grad=False)
    norm.weight.weight_loader = _load_and_add_one


def _load_and_add_one(param: nn.Parameter, loaded_weight: Any) -> None:
    default_weight_loader(param, loaded_weight)
    param.data += 1


DEFAULTS = {
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def read_gguf_fields(raw: Fields, number: Callable[..., Any]) -> Fields:
    if "attn_factor" in (raw["rope_scaling"] or {}):  # for which of its two rotations is not said
        raise ValueError("rope.scaling.attn_factor is not supported for gemma3, only 1")
    window = number("attention.sliding_window", 0)
    divisor = raw["head_dim"]
    if raw["num_hidden_layers"] == 62:  # the model of 27b, which is not told in any other way
        divisor = raw["hidden_size"] // max(raw["num_attention_heads"], 1)
    return {
        "sliding_window": window or None,
        "sliding_window_pattern": number("attention.sliding_window_pattern", 6) if window else 1,
        "rope_local_base_freq": number("rope.freq_base_swa", 10000.0, kind=float),
        "query_pre_attn_scalar": divisor,
        "final_logit_softcapping": number("final_logit_softcapping", 0.0, kind=float) or None,
    }


MODULES = LAYER_MODULES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF = GGUFFacts("gemma3", MODULES, added_to_norms=1.0, read_fields=read_gguf_fields)
FACTS = Facts(Gemma3ForCausalLM, "gemma3_text", DEFAULTS, GGUF)
