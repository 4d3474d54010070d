"""Exact attention in torch: what a CPU computes.

A row of scores belongs to one query and head. The rows of a kv head are computed in tiles of QUERY_TILE, over
tiles of KEY_TILE keys that begin at multiples of it. Both are filled up with zeros: the library's products
then have one shape, and a row gets the same bits whatever else is in its tile. Its highest score is that of
all keys it sees, and the tiles of keys are added up in order, so that those it does not see add nothing.
Everything is float32.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.kernels.runtime import LOG2_E, cdiv

QUERY_TILE = 32
KEY_TILE = 64
WIDTH = 16  # of a narrower result some rows of a tile would be added in another order
# torch computes exp2 in blocks of 32 numbers, and by other code what is left over, also at borders between
# threads. So many tiles of weights it leaves to one.
TILES_AT_ONCE = 16


def exact_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Any, layout: CacheLayout
) -> Tensor:
    """As `exact_attention`. A context of 0, which is a padded row of a decode step, gives zeros."""
    if step.is_prefill:
        lens_q, lens_k = (x.diff().tolist() for x in (step.cu_seqlens_q, step.cu_seqlens_k))
    else:
        lens_q, lens_k = [1] * len(q), step.context_lens.tolist()
    out = torch.zeros_like(q)
    for i, (queries, attended) in enumerate(zip(q.split(lens_q), out.split(lens_q), strict=True)):
        if not (lens_q[i] and lens_k[i]):
            continue
        if step.block_tables is None:
            keys, values = (x.split(lens_k)[i].transpose(0, 1) for x in (k, v))
        else:
            keys, values = layout.read(k, v, step.block_tables[i], 0, lens_k[i], q)
        attended[:] = _attend(queries, keys, values, variant.scale)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """
    Attention of a sequence's last tokens, q [tokens, heads, head_dim], over keys and values
    [kv_heads, all of its tokens, head_dim]. -> The shape of q, float32.
    """
    kv_heads, num_keys, head_dim = keys.shape
    rows = q.unflatten(1, (kv_heads, -1)).transpose(0, 1)  # [kv_heads, tokens, heads of each, head_dim]
    num_heads = rows.shape[2]
    num_before = num_keys - len(q)
    keys = _tiles(keys, KEY_TILE)
    # A column of ones adds up the weights.
    values = _tiles(F.pad(values, (0, 1), value=1.0), KEY_TILE)
    token = torch.arange(keys.shape[1] * KEY_TILE).view(-1, 1, KEY_TILE)
    results = []
    for i, query in enumerate(_tiles(rows.flatten(1, 2), QUERY_TILE).unbind(1)):
        last = num_before + torch.arange(i * QUERY_TILE, (i + 1) * QUERY_TILE) // num_heads  # key of each row
        num_tiles = cdiv(min(int(last[-1]) + 1, num_keys), KEY_TILE)
        # [kv_heads, tiles, QUERY_TILE, KEY_TILE]
        scores = (query[:, None] @ keys[:, :num_tiles].contiguous().mT).mul_(scale * LOG2_E)
        scores.masked_fill_(token[:num_tiles] > last[:, None], float("-inf"))
        scores -= scores.amax((1, 3), keepdim=True)
        for some in scores.flatten(0, 1).split(TILES_AT_ONCE):
            some.exp2_()
        total = functools.reduce(torch.add, (scores @ values[:, :num_tiles]).unbind(1))
        results.append(total[..., :head_dim] / total[..., head_dim : head_dim + 1])
    result = torch.cat(results, dim=1)[:, : len(q) * num_heads]
    return result.unflatten(1, (len(q), num_heads)).transpose(0, 1).flatten(1, 2)


def _tiles(x: Tensor, size: int) -> Tensor:
    """x [heads, rows, width] as float32 [heads, tiles, size, WIDTH or a multiple], with zeros behind."""
    padding = 0, -x.shape[2] % WIDTH, 0, -x.shape[1] % size
    return F.pad(x.float(), padding).contiguous().unflatten(1, (-1, size))
