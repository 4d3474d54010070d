"""Products on a CPU by oneDNN, which multiplies fastest from a layout of its own.

A weight is brought into it once, when it is loaded. Such a tensor (`is_mkldnn`) can only be multiplied, or
read with `to_dense`.
"""

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels.runtime import is_on_gpu
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding

FEWEST_ROWS = 1  # the layout is chosen for so many rows; measured, it is no slower for many


def pack(weight: Tensor) -> Tensor | None:
    """
    The weight [out, in] in oneDNN's layout, or None where it cannot be multiplied so. It is said if the dtype
    is one that torch then multiplies many times as slowly as others.
    """
    if is_on_gpu(weight) or not torch.backends.mkldnn.is_available() or not weight.numel():
        return None
    ops = torch.ops.mkldnn
    computes = {
        torch.bfloat16: ops._is_mkldnn_bf16_supported(),
        torch.float16: ops._is_mkldnn_fp16_supported(),
        torch.float32: True,
    }
    if computes.get(weight.dtype):
        return ops._reorder_linear_weight(weight.detach(), FEWEST_ROWS)
    if weight.dtype == torch.float16:
        message = (
            "this CPU is slow in float16 with more than one token a step: see dtype='bfloat16', 'float32'"
        )
        warnings.warn(message, stacklevel=2)
    return None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, in] @ weight.T + bias: [tokens, out]."""
    num_rows = len(x)
    # oneDNN makes code for each number of rows and each shape of a weight: milliseconds, and half a megabyte
    # that it keeps. So that there are few, rows are filled up, by an eighth at most.
    step = 1 << max(0, (num_rows - 1).bit_length() - 4)
    padding = -num_rows % step
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    y = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return y[:num_rows] if padding else y


class PackedHead(ParallelLMHead):
    is_tied = False  # to an embedding

    def finish(self) -> None:
        """
        As for linear layers. A weight that is tied is kept beside it: rows cannot be looked up in the other
        layout, and a decode step of a small model spends a third of its time here without it.
        """
        packed = pack(self.weight[: self.vocab_end - self.vocab_start])
        if packed is None:
            return
        self.logits = functools.partial(multiply, weight=packed)
        if not self.is_tied:
            self.weight = nn.Parameter(packed, requires_grad=False)


def use_packed_heads(model: nn.Module) -> None:
    """The LM heads of a model that is not loaded yet become packed ones."""
    embedded = [module.weight for module in model.modules() if type(module) is VocabParallelEmbedding]
    for module in model.modules():
        if type(module) is ParallelLMHead:
            module.__class__ = PackedHead
            module.is_tied = any(weight is module.weight for weight in embedded)
