"""RMSNorm, alone or fused with the residual addition before it (arXiv:1910.07467)."""

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
        return self.group.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)
