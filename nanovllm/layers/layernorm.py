"""RMSNorm (arXiv:1910.07467), and the residual stream that decoder layers pass on.

The stream is a residual with a lazy RMSNorm: who multiplies next decides when to normalise. Models pass it on
and never ask. Products that leave a part of the norm or of the addition to the next one make subclasses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanovllm.distributed.group import get_group
from nanovllm.kernels.layernorm import add_rms_norm
from nanovllm.utils.loader import default_weight_loader


class RMSNorm(nn.Module):
    """Normalises the last dimension in float32 and returns the input's dtype. Inputs are not changed."""

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.group = get_group()
        self.weight = nn.Parameter(torch.ones(hidden_size), requires_grad=False)
        self.weight.weight_loader = default_weight_loader

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """
        x [..., hidden] -> norm(x). With a residual of the same shape x is this rank's part of a sum over the
        ranks -> (norm(sum + residual), sum + residual).
        """
        if residual is None:
            return add_rms_norm(x, None, self.weight, self.eps)[0]
        add = self.group.all_reduce_add_rms_norm if self.group.size > 1 else add_rms_norm
        return add(x, residual, self.weight, self.eps)


@dataclass
class Stream:
    """`x` in front of `norm`; `normed` is norm(x), if it has been computed."""

    x: Tensor  # [tokens, hidden]
    norm: RMSNorm
    normed: Tensor | None = None  # [tokens, hidden]

    @property
    def is_untouched(self) -> bool:
        """Whether x is complete and nothing of the norm has been computed."""
        return self.normed is None

    def residual(self) -> Tensor:
        """x, [tokens, hidden]; with several ranks only the rows that this one has to add to are valid."""
        return self.x

    def normalised(self) -> Tensor:
        """norm(x), [tokens, hidden]."""
        return self.norm(self.x) if self.normed is None else self.normed

    def add(self, y: Tensor, next_norm: RMSNorm) -> "Stream":
        """The stream plus y, this rank's share of a sum over the ranks, in front of the next norm."""
        normed, total = next_norm(y, self.residual())
        return Stream(total, next_norm, normed)
