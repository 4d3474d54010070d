"""Gemma 3 (text): most layers attend to a window of tokens, what is added to the residual is normalised
first, and embeddings are scaled.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.extensions.models.decoder import Decoder, DecoderConfig
from nanovllm.extensions.models.gguf import Fields, GGUFModel, Number, gemma
from nanovllm.kernels.activation import activate_and_mul
from nanovllm.kernels.runtime import tl, triton, use_triton
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.qwen3 import Qwen3DecoderLayer
from nanovllm.utils.loader import default_weight_loader


class Gemma3DecoderLayer(Qwen3DecoderLayer):
    """What attention and the MLP compute goes through a norm of its own before it is added."""

    def __init__(self, config: DecoderConfig, rotary_emb: RotaryEmbedding):
        super().__init__(config, rotary_emb)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: Tensor, stream: Stream, next_norm: RMSNorm) -> Stream:
        attention, mlp, mlp_norm = self.self_attn, self.mlp, self.pre_feedforward_layernorm
        attended = attention.attend(positions, attention.qkv_proj(stream))
        stream = add_normed(attention.o_proj, stream, attended, self.post_attention_layernorm, mlp_norm)
        activated = gelu_and_mul(mlp.gate_up_proj(stream))
        return add_normed(mlp.down_proj, stream, activated, self.post_feedforward_layernorm, next_norm)


def add_normed(
    layer: RowParallelLinear, stream: Stream, x: Tensor, own_norm: RMSNorm, next_norm: RMSNorm
) -> Stream:
    """`RowParallelLinear.add_to`, but the product goes through a norm of its own before it is added."""
    bias = layer.bias if layer.group.rank == 0 else None
    y = layer.group.all_reduce(layer.product(len(x)).linear(x, bias))
    return Stream(stream.residual() + own_norm(y), next_norm)


def gelu_and_mul(x: Tensor) -> Tensor:
    """
    x [..., 2 * width] -> gelu(first half) * second half, [..., width], with gelu in its approximation by tanh
    (GeGLU: Shazeer, 2020).
    """
    return activate_and_mul(x, gelu) if use_triton(x) else gelu_and_mul_torch(x)


def gelu_and_mul_torch(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@triton.jit
def gelu(x):
    """x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))"""
    return x / (1.0 + tl.exp(-(1.5957691216057308 * (x + 0.044715 * x * x * x))))


def read_gguf(fields: Fields, number: Number, stored: Fields) -> Fields:
    if "attn_factor" in (fields["rope_scaling"] or {}):  # for which of its two rotations is not said
        raise ValueError("rope.scaling.attn_factor is not supported for gemma3, only 1")
    pattern = number("attention.sliding_window_pattern", 6) if fields["sliding_window"] else 1
    return gemma(fields, number, stored) | {"sliding_window_pattern": pattern}


class Gemma3ForCausalLM(Decoder):
    model_type = "gemma3_text"
    defaults = {
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }
    layer_class = Gemma3DecoderLayer
    gguf = GGUFModel(
        "gemma3",
        "gemma3_text",
        "sliding_window final_logit_softcapping rope_local_base_freq",
        read_gguf,
        gguf_added_to_norms=1.0,
    )

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        embedding = self.model.embed_tokens
        scale = torch.tensor(config.hidden_size**0.5, dtype=embedding.weight.dtype, device="cpu").item()
        embedding.register_forward_hook(lambda _module, _args, embedded: embedded * scale)
        for norm in self.modules():
            if isinstance(norm, RMSNorm):
                norm.weight.data = norm.weight.float()
                norm.weight.weight_loader = load_less_one


def load_less_one(param: nn.Parameter, loaded_weight: Any) -> None:
    """
    Checkpoints have norms' weights less 1. They are kept in float32: beside the 1 bfloat16 would lose most of
    what checkpoints have.
    """
    default_weight_loader(param, loaded_weight)
    param.data += 1
