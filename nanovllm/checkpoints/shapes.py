"""Checkpoints that are only the sizes of a well-known model: random weights, for measuring speed."""

from collections.abc import Iterator
from typing import Any

from nanovllm.checkpoints.model_config import ModelConfig, merge_eos_ids
from nanovllm.checkpoints.tokenizer import toy_tokenizer

# name -> hidden_size, layers, heads, KV heads, intermediate_size, tied embeddings
SHAPES = {
    "qwen3-0.6b": (1024, 28, 16, 8, 3072, True),
    "qwen3-4b": (2560, 36, 32, 8, 9728, True),
    "qwen3-8b": (4096, 36, 32, 8, 12288, False),
    "qwen3-32b": (5120, 64, 64, 8, 25600, False),
}


class ShapeCheckpoint:
    """The sizes of a well-known model, for measuring speed without downloading anything."""

    random_weights = True

    def __init__(self, name: str):
        self.path = name

    def hf_config(self) -> ModelConfig:
        hidden_size, layers, heads, kv_heads, intermediate_size, tied = SHAPES[self.path]
        return ModelConfig.from_dict(
            self.path,
            {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "hidden_size": hidden_size,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": 128,
                "intermediate_size": intermediate_size,
                "vocab_size": 151936,
                "max_position_embeddings": 40960,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "tie_word_embeddings": tied,
                "dtype": "bfloat16",
            },
        )

    def tokenizer(self) -> Any:
        return toy_tokenizer()

    def generation_config(self) -> dict[str, Any]:
        return {}

    def eos_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        return merge_eos_ids(self.path, getattr(tokenizer, "eos_token_id", None))

    def tensors(self) -> Iterator[Any]:
        return iter(())
