"""Qwen3, and the decoder that its relatives share.

Tokens of all sequences come concatenated, [tokens, ...]; only attention knows where one sequence ends
(through `Context`). The residual stream is carried beside the hidden states so that each addition is fused
into the next norm. What differs between relatives is passed down as `qk_norm`, `qkv_bias`, `o_bias` and
`mlp_bias`.
"""

from typing import Any

import torch
from torch import nn

from nanovllm.distributed import group
from nanovllm.kernels.fused_linear import (
    Stream,
    begin_stream,
    can_be_fused,
    fused_linear_pays,
    linear_add,
    norm_linear,
)
from nanovllm.kernels.kv_store import qk_norm_rope_store
from nanovllm.kernels.matvec import linear_small, linear_small_pays
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding, context_limit, get_rope, rope_parameters
from nanovllm.utils.context import get_context


def get_head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Qwen3Attention(nn.Module):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, qk_norm: bool, qkv_bias: bool, o_bias: bool):
        super().__init__()
        head_dim = get_head_dim(config)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head_dim, config.num_attention_heads, config.num_key_value_heads, qkv_bias
        )
        heads_size = config.num_attention_heads * head_dim
        self.o_proj = RowParallelLinear(heads_size, config.hidden_size, o_bias, reduce=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if qk_norm else None
        self.rotary_emb = rotary_emb
        self.attn = Attention(self.qkv_proj.num_heads, head_dim, head_dim**-0.5, self.qkv_proj.num_kv_heads)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.attend(positions, self.qkv_proj(hidden_states)))

    def attend(self, positions: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """From the projections to the heads' outputs."""
        self.store(positions, qkv)
        return self.attn.attend(*self.split_heads(qkv))

    def store(self, positions: torch.Tensor, qkv: torch.Tensor) -> None:
        """Norms and rotation of q and k, in place, and the KV store, in one pass."""
        attn = self.attn
        qk_norm_rope_store(
            qkv,
            attn.num_heads,
            attn.num_kv_heads,
            attn.head_dim,
            self.q_norm.weight if self.q_norm else None,
            self.k_norm.weight if self.k_norm else None,
            self.q_norm.eps if self.q_norm else 0.0,
            positions,
            self.rotary_emb.cos_sin_cache,
            attn.k_cache,
            attn.v_cache,
            get_context().slot_mapping,
        )

    def split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """-> q, k and v, [tokens, heads of each, head_dim]."""
        attn = self.attn
        heads = qkv.view(len(qkv), -1, attn.head_dim)
        return heads.split((attn.num_heads, attn.num_kv_heads, attn.num_kv_heads), dim=1)


class Qwen3MLP(nn.Module):
    def __init__(self, config: Any, mlp_bias: bool):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.intermediate_size] * 2, mlp_bias
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, mlp_bias, reduce=False
        )
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Qwen3DecoderLayer(nn.Module):
    def __init__(
        self,
        config: Any,
        rotary_emb: RotaryEmbedding,
        qk_norm: bool,
        qkv_bias: bool,
        o_bias: bool,
        mlp_bias: bool,
    ):
        super().__init__()
        self.self_attn = Qwen3Attention(config, rotary_emb, qk_norm, qkv_bias, o_bias)
        self.mlp = Qwen3MLP(config, mlp_bias)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes in (except into the first layer) and goes out is this rank's part of a sum."""
        if residual is None:
            hidden_states, residual = self.input_layernorm(hidden_states), hidden_states
        else:
            hidden_states, residual = self.input_layernorm.after_reduce(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm.after_reduce(hidden_states, residual)
        return self.mlp(hidden_states), residual

    def forward_small(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """
        The same for a few tokens, where launches and small reads weigh: each product takes its neighbours
        (norm, activation, residual addition) into its own kernel. x is the complete residual stream.
        """
        attn, mlp = self.self_attn, self.mlp
        norm = self.input_layernorm
        qkv = linear_small(x, attn.qkv_proj.weight, attn.qkv_proj.bias, norm_weight=norm.weight, eps=norm.eps)
        x = linear_small(attn.attend(positions, qkv), attn.o_proj.weight, attn.o_proj.bias, residual=x)
        norm, up, down = self.post_attention_layernorm, mlp.gate_up_proj, mlp.down_proj
        gated = linear_small(x, up.weight, up.bias, norm_weight=norm.weight, eps=norm.eps, silu_and_mul=True)
        return linear_small(gated, down.weight, down.bias, residual=x)

    def forward_small_split(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, next_norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The same where each rank has a part of every product: the norms come with the sums over the ranks. x
        is normalised already and so is what is returned.
        """
        attn, mlp = self.self_attn, self.mlp
        qkv = linear_small(x, attn.qkv_proj.weight, attn.qkv_proj.bias)
        part = linear_small(attn.attend(positions, qkv), attn.o_proj.weight, attn.o_proj.bias_here)
        x, residual = self.post_attention_layernorm.after_reduce(part, residual)
        gated = linear_small(x, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, silu_and_mul=True)
        part = linear_small(gated, mlp.down_proj.weight, mlp.down_proj.bias_here)
        return next_norm.after_reduce(part, residual)

    def forward_fused(self, positions: torch.Tensor, stream: Stream, next_norm: RMSNorm) -> Stream:
        """The same for a batch of decoding sequences, where each norm is shared by the products around it."""
        attn, mlp, norm = self.self_attn, self.mlp, self.post_attention_layernorm
        qkv = norm_linear(stream, attn.qkv_proj.weight, attn.qkv_proj.bias, eps=norm.eps)
        out = attn.attend(positions, qkv)
        stream = linear_add(out, attn.o_proj.weight, attn.o_proj.bias, stream.x, norm.weight)
        up, down = mlp.gate_up_proj, mlp.down_proj
        gated = norm_linear(stream, up.weight, up.bias, eps=norm.eps, silu_and_mul=True)
        return linear_add(gated, down.weight, down.bias, stream.x, next_norm.weight)


class Qwen3Model(nn.Module):
    def __init__(self, config: Any, **variant: bool):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        max_position = getattr(config, "max_model_len", None) or context_limit(config)
        rotary_emb = get_rope(get_head_dim(config), max_position, rope_parameters(config))
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, rotary_emb, **variant) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.is_split = group.tp_size() > 1
        matrices = [weight for weight in self.layers.parameters() if weight.dim() == 2]
        self.is_fusable = not self.is_split and all(map(can_be_fused, matrices))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden_states, residual = self.embed_tokens(input_ids), None
        decoding = not get_context().is_prefill  # a prefill uses one path, so that a start compiles one
        norms = [*(layer.input_layernorm for layer in self.layers), self.norm]
        if decoding and linear_small_pays(hidden_states) and self.is_split:
            hidden_states, residual = norms[0](hidden_states), hidden_states
            for layer, next_norm in zip(self.layers, norms[1:], strict=True):
                hidden_states, residual = layer.forward_small_split(
                    positions, hidden_states, residual, next_norm
                )
            return hidden_states
        if decoding and linear_small_pays(hidden_states):
            for layer in self.layers:
                hidden_states = layer.forward_small(positions, hidden_states)
            return self.norm(hidden_states)
        if decoding and self.is_fusable and fused_linear_pays(hidden_states):
            stream = begin_stream(hidden_states, norms[0].weight, norms[0].eps)
            for layer, next_norm in zip(self.layers, norms[1:], strict=True):
                stream = layer.forward_fused(positions, stream, next_norm)
            return self.norm(stream.x)
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.norm.after_reduce(hidden_states, residual)[0]


class Qwen3ForCausalLM(nn.Module):
    """
    `packed_modules_mapping`: name in the checkpoint -> (our parameter that it is a part of, which part).
    """

    packed_modules_mapping = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: Any):
        super().__init__()
        self.model = Qwen3Model(config, **self.variant(config))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @staticmethod
    def variant(config: Any) -> dict[str, bool]:
        bias = bool(getattr(config, "attention_bias", False))
        return dict(qk_norm=True, qkv_bias=bias, o_bias=bias, mlp_bias=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions int64 [tokens] -> hidden states [tokens, hidden_size]."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """-> logits [sequences, vocab_size]."""
        return self.lm_head(hidden_states)
