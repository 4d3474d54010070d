"""Qwen3, and the decoder that its relatives share.

Tokens of all sequences come concatenated, [tokens, ...]; only attention knows where one sequence ends
(through `Context`). Layers pass on a `Stream`: the residual in front of the norm that comes next.
"""

from torch import Tensor, nn

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding, get_rope


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding):
        super().__init__()
        head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.attention_bias,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * head_dim, config.hidden_size, config.attention_bias
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.rotary_emb = rotary_emb
        self.attn = Attention(self.qkv_proj.num_heads, head_dim, head_dim**-0.5, self.qkv_proj.num_kv_heads)

    def forward(self, positions: Tensor, stream: Stream, next_norm: RMSNorm) -> Stream:
        attended = self.attend(positions, self.qkv_proj(stream))
        return self.o_proj.add_to(stream, attended, next_norm)

    def attend(self, positions: Tensor, qkv: Tensor) -> Tensor:
        """From the projections to the heads' outputs, [tokens, heads * head_dim]."""
        q, k, v = self.attn.rotate_and_store(positions, qkv, self.rotary_emb, self.q_norm, self.k_norm)
        return self.attn(q, k, v)


class Qwen3MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, bias)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias)

    def forward(self, stream: Stream, next_norm: RMSNorm) -> Stream:
        gated = self.gate_up_proj(stream, silu_and_mul=True)
        return self.down_proj.add_to(stream, gated, next_norm)


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding):
        super().__init__()
        self.self_attn = Qwen3Attention(config, rotary_emb)
        self.mlp = Qwen3MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: Tensor, stream: Stream, next_norm: RMSNorm) -> Stream:
        """The stream comes in front of `input_layernorm`."""
        stream = self.self_attn(positions, stream, self.post_attention_layernorm)
        return self.mlp(stream, next_norm)


class Qwen3Model(nn.Module):
    def __init__(self, config: ModelConfig, layer_class: type[Qwen3DecoderLayer]):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        rope = get_rope(config.head_dim, config.max_model_len, config.rope_parameters)
        layers = [layer_class(config, rope) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.next_norms = [layer.input_layernorm for layer in layers[1:]] + [self.norm]

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        stream = Stream(self.embed_tokens(input_ids), self.layers[0].input_layernorm)
        for layer, next_norm in zip(self.layers, self.next_norms, strict=True):
            stream = layer(positions, stream, next_norm)
        return stream.normalised()


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

    layer_class = Qwen3DecoderLayer

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.model = Qwen3Model(config, self.layer_class)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.tie_to(self.model.embed_tokens)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions int64 [tokens] -> hidden states [tokens, hidden_size]."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """-> logits [sequences, vocab_size]."""
        return self.lm_head(hidden_states)
