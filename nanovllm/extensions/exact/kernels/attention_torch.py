"""Exact attention in torch: what a CPU computes.

A row of scores belongs to one query and head. The rows of a kv head are computed in tiles of QUERY_TILE, over
tiles of KEY_TILE keys that begin at multiples of it. Both are filled up with zeros: the library's products
then have one shape, and a row gets the same bits whatever else is in its tile. Its highest score is that of
all keys it sees, and the tiles of keys are added up in order, so that those it does not see add nothing.
Everything is float32.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.runtime import LOG2_E, cdiv

QUERY_TILE = 32
KEY_TILE = 64
WIDTH = 16  # of a narrower result some rows of a tile would be added in another order
# torch computes exp2 in blocks of 32 numbers, and by other code what is left over, also at borders between
# threads. So many tiles of weights it leaves to one.
TILES_AT_ONCE = 16


class ExactVariant(AttentionVariant):
    """Plain attention for the core's references, which read the keys and values of a sequence."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Float32. A mask says no more than that the queries are those of a sequence's last tokens."""
        is_decode = mask is None and not is_causal  # like a prefill of one token
        axes = (0, 1) if is_decode else (1, 2)
        rows = q.transpose(*axes)  # [kv_heads, tokens, heads of each, head_dim]
        k, v = (x[0] if is_decode else x[:, 0] for x in (k, v))  # [kv_heads, keys, head_dim]
        _, num_queries, num_heads, head_dim = rows.shape
        num_keys = k.shape[1]
        queries, keys = _tiles(rows.flatten(1, 2), QUERY_TILE), _tiles(k, KEY_TILE)
        # A column of ones adds up the weights.
        values = _tiles(F.pad(v, (0, 1), value=1.0), KEY_TILE)
        token = torch.arange(keys.shape[1] * KEY_TILE).view(-1, 1, KEY_TILE)
        row = torch.arange(queries.shape[1] * QUERY_TILE).view(-1, QUERY_TILE)
        last_keys = row // num_heads + num_keys - num_queries  # that rows see
        results = []
        for query, last in zip(queries.unbind(1), last_keys, strict=True):
            num_tiles = cdiv(min(int(last[-1]) + 1, num_keys), KEY_TILE)
            # [kv_heads, tiles, QUERY_TILE, KEY_TILE]
            scores = (query[:, None] @ keys[:, :num_tiles].contiguous().mT).mul_(self.scale * LOG2_E)
            scores.masked_fill_(token[:num_tiles] > last[:, None], float("-inf"))
            scores -= scores.amax((1, 3), keepdim=True)
            for some in scores.flatten(0, 1).split(TILES_AT_ONCE):
                some.exp2_()
            total = functools.reduce(torch.add, (scores @ values[:, :num_tiles]).unbind(1))
            results.append(total[..., :head_dim] / total[..., head_dim : head_dim + 1])
        result = torch.cat(results, dim=1)[:, : num_queries * num_heads]
        return result.unflatten(1, (num_queries, num_heads)).transpose(*axes)


def _tiles(x: Tensor, size: int) -> Tensor:
    """x [heads, rows, width] as float32 [heads, tiles, size, WIDTH or a multiple], with zeros behind."""
    padding = 0, -x.shape[2] % WIDTH, 0, -x.shape[1] % size
    return F.pad(x.float(), padding).contiguous().unflatten(1, (-1, size))
