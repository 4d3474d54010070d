"""Models without files, for measuring speed.

The sizes of well-known ones, random numbers in place of weights, and a tokenizer of bytes.
"""

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.utils.loader import default_weight_loader

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
TOY_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@torch.no_grad()
def fill_with_random_values(model: nn.Module) -> None:
    """
    Norms are 1, biases 0, matrices normal with deviation 0.02, the same every time for the same name.
    Quantised ones are made from such a matrix.
    """

    def make_normal(matrix: Tensor, name: str) -> Tensor:
        generator = torch.Generator(matrix.device).manual_seed(zlib.crc32(name.encode()))
        return matrix.normal_(0, 0.02, generator=generator)

    for name, param in model.named_parameters():
        if getattr(param, "weight_loader", default_weight_loader) is None:
            continue
        if param.dim() == 1:
            param.fill_(0 if name.endswith("bias") else 1)
        else:
            make_normal(param, name)
    for name, layer in model.named_modules():
        if getattr(layer, "stored_tensors", lambda name: {})(name):
            matrix = torch.empty(layer.matrix.shape, device=next(layer.parameters()).device)
            values = make_normal(matrix, f"{name}.weight")
            if hasattr(layer.matrix, "fill"):
                layer.matrix.fill(values)
            else:
                layer.matrix.weight.copy_(values)


def toy_tokenizer() -> Any:
    """Ids 0 to 255 are the bytes of UTF-8 and 256 ends a sequence; any other id decodes to nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = Tokenizer(models.BPE({char: byte for byte, char in bytes_to_unicode().items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"eos_token": "<|end|>", "pad_token": "<|end|>", "chat_template": TOY_CHAT_TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


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

    tokenizer = staticmethod(toy_tokenizer)
