"""Whether a model that transformers has built computes each token as if it were alone.

Its layers' products and its attention are exact; what stands between them is transformers' code, whose
reductions may choose their order by the number of rows. So the loaded model runs on sequences of a token
each, which must have the same bits in any company.
"""

import torch
from torch import Tensor, nn

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.engine.interfaces import Observer
from nanovllm.extensions.exact.products import exact_linear
from nanovllm.utils.context import reset_context, set_context

ROWS = 1, 2, 3, 5, 9, 17, 65  # that are compared with those of MOST_ROWS
MOST_ROWS = 257


class BackendCheck(Observer):
    """Makes the head exact, and refuses the model type, by a ValueError, if it finds other bits."""

    def __init__(self, config: ModelConfig):
        self.config = config

    @torch.inference_mode()
    def before_warmup(self, model: nn.Module) -> None:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = ExactLinear
        whole = _run(model, MOST_ROWS)
        is_exact = all(torch.equal(_run(model, rows), whole[:rows]) for rows in ROWS)
        # Experts choose their products by the kind of step, too.
        if not is_exact or any(hasattr(module, "num_experts") for module in model.modules()):
            raise ValueError(
                f"exact=True cannot be used with model type {self.config.raw['model_type']!r} through "
                "transformers: what it computes of a token depends on others of a step"
            )


class ExactLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return exact_linear(x[0], self.weight, self.bias)[None]


def _run(model: nn.Module, rows: int) -> Tensor:
    """The bytes of each token's hidden state and logits, for some tokens."""
    with next(model.parameters()).device:
        starts, tokens = torch.arange(rows + 1, dtype=torch.int32), torch.arange(rows)
    set_context(
        True,
        slot_mapping=torch.full_like(starts, -1),
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=1,
        max_seqlen_k=1,
    )
    hidden_states = model(tokens, tokens % 16)
    both = torch.cat((hidden_states, model.compute_logits(hidden_states)), dim=1)
    reset_context()
    return both.view(torch.uint8)
