"""The two ends of the model, both split by vocabulary rows: token embedding and LM head.

A vocabulary that the ranks do not divide is padded on the last ones; the padding is never looked up or
sampled.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.distributed.group import get_group
from nanovllm.kernels.runtime import cdiv
from nanovllm.layers.linear import Shard
from nanovllm.utils.context import get_context

GATHER_WIDTH = 1024  # of rows whose sum over the ranks is computed fast


class VocabParallelEmbedding(nn.Module):
    """This rank has the rows from `vocab_start` to `vocab_end`."""

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__()
        self.num_embeddings = num_embeddings
        self.group = get_group()
        rows = cdiv(num_embeddings, self.group.size)
        self.vocab_start = min(self.group.rank * rows, num_embeddings)
        self.vocab_end = min(self.vocab_start + rows, num_embeddings)
        self.weight = nn.Parameter(torch.zeros(rows, embedding_dim), requires_grad=False)
        own_rows = slice(self.vocab_start, self.vocab_end)
        self.weight.weight_loader = Shard((num_embeddings, embedding_dim), own_rows).load

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [tokens] -> [tokens, embedding_dim], complete on every rank."""
        if self.group.size == 1:
            return self.weight[input_ids]
        mine = (input_ids >= self.vocab_start) & (input_ids < self.vocab_end)
        rows = (input_ids - self.vocab_start) * mine
        y = self.weight[rows] * mine.unsqueeze(1)
        return self.group.all_reduce(y)


class ParallelLMHead(VocabParallelEmbedding):
    def tie_to(self, embedding: VocabParallelEmbedding) -> None:
        """Share the embedding's weight."""
        self.weight = embedding.weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        """
        hidden_states [tokens, embedding_dim] -> logits [sequences, this rank's vocabulary rows].

        In prefill only the last position of each sequence is needed: the others' next tokens are known.
        """
        step = get_context()
        if step.is_prefill:
            hidden_states = hidden_states[step.cu_seqlens_q[1:] - 1]
        return self.logits(hidden_states)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [tokens, embedding_dim] -> logits [tokens, this rank's vocabulary rows]."""
        num_rows = self.vocab_end - self.vocab_start
        return F.linear(hidden_states, self.weight[:num_rows])

    def gather(self, logits: Tensor) -> Tensor:
        """Logits of every rank's vocabulary rows [tokens, num_embeddings], on every rank."""
        if self.group.size == 1:
            return logits
        # A sum to which each rank brings its part, in rows of a length that suits the ranks' kernel.
        width = cdiv(self.num_embeddings, GATHER_WIDTH) * GATHER_WIDTH
        padded = F.pad(logits, (self.vocab_start, width - self.vocab_end))
        whole = self.group.all_reduce(padded.view(-1, GATHER_WIDTH))
        return whole.view(-1, width)[:, : self.num_embeddings]
