"""Checkpoints that are only the sizes of a well-known model: random weights, for measuring speed."""

from typing import Any

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.extensions.checkpoints.made_up import toy_tokenizer

FIELDS = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size "
    "tie_word_embeddings"
).split()
SHAPES = {
    "qwen3-0.6b": (1024, 28, 16, 8, 3072, True),
    "qwen3-4b": (2560, 36, 32, 8, 9728, True),
    "qwen3-8b": (4096, 36, 32, 8, 12288, False),
    "qwen3-32b": (5120, 64, 64, 8, 25600, False),
    "qwen3-30b-a3b": (2048, 48, 32, 4, 6144, False),
    "gpt-oss-20b": (2880, 24, 64, 8, 2880, False),
}
# What differs from a Qwen3 without experts.
OTHERS = {
    "qwen3-30b-a3b": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 32,
        "head_dim": 64,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}


class ShapeCheckpoint(Checkpoint):
    """The configuration of one of `SHAPES`, and no files."""

    def fields(self) -> dict[str, Any]:
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            **dict(zip(FIELDS, SHAPES[self.path], strict=True)),
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "dtype": "bfloat16",
            **OTHERS.get(self.path, {}),
        }

    def tokenizer(self) -> Any:
        return toy_tokenizer()
