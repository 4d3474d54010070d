"""What a checkpoint without weights gets in their place: random numbers, and a tokenizer of bytes."""

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.utils.loader import default_weight_loader

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
