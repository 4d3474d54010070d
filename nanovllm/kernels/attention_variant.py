"""What a layer's attention computes, and the places where an extension may change it.

The core knows one kind: a query at position i sees the keys 0..i, and their values are added up with the
weights softmax(scale * q k^T). Other models change a line or two in the middle of a kernel: which keys are
seen, what happens to a score, what the softmax begins with. So the kernels call *hooks*: small Triton
functions that are constants of a launch. The compiler inlines them, and a hook that is None leaves no
instruction behind. A variant has each change twice: as a hook for the kernels, and as a torch method.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Hooks(NamedTuple):
    """
    Triton functions that attention kernels call, or None. Each gets this record itself as the constant HOOKS,
    and the variant's tensors as `extras`. Scores, `highest` and log sums are in units of log2.

    first_token(extras, seq, context_len, HOOKS): the first token that a query sees; below 0 is 0, too.
    `context_len` counts the tokens up to it, itself among them: a number, or (in prefill) a tensor of them.
    score(extras, score, head, distance, HOOKS): a tile of scores -> what takes their place. `distance`, by
    how many tokens each key lies before its query, broadcasts to the tile; so do the numbers of heads.
    begin(extras, index, highest, total, SIZES, HOOKS) -> highest, total, kept: what a decode program begins
    with. Its sequence is program_id(1), and if program_id(2) is 0 it has the first split, to which keys may
    be added that are not in the cache. `index` is (row, head, dim), see `begin_decode`; `highest` is
    [HEADS_PAD], `total` [TILE, HEADS_PAD].
    end(kept, index, sums, SIZES, HOOKS) -> sums: what a decode program does with its results, which are
    highest and total [HEADS_PAD] and acc [DIM_PAD, HEADS_PAD].
    begin_prefill(extras, head, highest, total, HOOKS) -> highest, total: the same for a tile of queries of
    one head.
    """

    first_token: Any = None
    score: Any = None
    begin: Any = None
    end: Any = None
    begin_prefill: Any = None
    constants: Any = None  # a record of what else the hooks need

    @property
    def cache_key(self) -> str:
        """
        What identifies these hooks in Triton's cache on disk. Without this property Triton would use `str`,
        which has the names of functions but not their code.
        """
        return "-".join(str(getattr(each, "cache_key", each)) for each in self)


class AttentionVariant:
    """
    Plain causal attention. A subclass replaces what it computes in another way. With a hook `score` it has a
    method score(scores, query, key), too: of scores [kv_heads, heads of each, queries, keys], or in decode
    [1, kv_heads, heads of each, keys], and of positions, which broadcast. With `begin` it has first_sums():
    the logs of what softmax denominators begin with, float32 [heads].
    """

    hooks = Hooks()
    extras: tuple[Any, ...] = ()  # tensors for the hooks
    # Whether a decode program reads only a few tokens, so that latency counts more than bandwidth.
    reads_few = False
    flash_problem = ""  # why flash-attn cannot compute it

    def __init__(self, scale: float):
        self.scale = scale

    def flash_options(self) -> dict[str, Any]:
        return {"softmax_scale": self.scale, "causal": True}

    def first_token(self, context_lens: Tensor) -> Tensor:
        """The first token that a query sees, for contexts of these lengths, the query itself included."""
        return torch.zeros_like(context_lens)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """
        Of one sequence. In decode, where all keys are seen: q [1, kv_heads, heads of each, head_dim], k and v
        [1, kv_heads, tokens, head_dim]. In prefill: q, k and v [kv_heads, heads of each, tokens, head_dim],
        and a mask, or `is_causal`: as many queries as keys, and each sees the keys up to its own.
        """
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=self.scale)
