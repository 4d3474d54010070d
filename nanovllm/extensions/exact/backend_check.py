"""Whether a model that transformers has built computes each token as if it were alone.

Its products and its attention are exact; what stands between them is transformers' code, whose reductions may
choose their order by the number of rows. So the loaded model runs on sequences of a token each: they must have
the same bits in any company.
"""

import torch
from torch import Tensor, nn

from nanovllm.engine.interfaces import Observer
from nanovllm.utils.context import reset_context, set_context

ROWS = 1, 2, 3, 5, 9, 17, 65  # that are compared with those of MOST_ROWS
MOST_ROWS = 257


class BackendCheck(Observer):
    """Refuses the model type, by a ValueError before the first step, if it finds other bits."""

    def __init__(self, model_type: str, vocab_size: int):
        self.model_type, self.vocab_size = model_type, vocab_size

    @torch.inference_mode()
    def before_warmup(self, model: nn.Module) -> None:
        tokens = torch.arange(MOST_ROWS) * 7919 % self.vocab_size
        whole = _run(model, tokens)
        is_exact = all(torch.equal(_run(model, tokens[-rows:]), whole[-rows:]) for rows in ROWS)
        # Stacked experts choose their products by what kind of step it is, too.
        if not is_exact or any(param.dim() > 2 for param in model.parameters()):
            raise ValueError(
                f"exact=True cannot be used with model type {self.model_type!r} through transformers: "
                "what it computes of a token depends on the others of a step"
            )


def _run(model: nn.Module, tokens: Tensor) -> Tensor:
    """The bytes of each token's hidden state and logits."""
    starts = torch.arange(len(tokens) + 1, dtype=torch.int32)
    lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=1, max_seqlen_k=1)
    set_context(True, slot_mapping=torch.full_like(starts, -1), **lengths)
    hidden_states = model(tokens, tokens % 16)
    both = torch.cat((hidden_states, model.compute_logits(hidden_states)), dim=1)
    reset_context()
    return both.view(torch.uint8)
