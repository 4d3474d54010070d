"""Attention of many sequences over what they begin with in common: keys and values are read once for all.

The query heads of a group's members stand below one another in a tile, so that one pass over the group's
tokens serves them all, on tensor cores. The results are partial: `paged_decode_attention` adds each
sequence's own tokens. Known as cascade attention, Hydragen (Juravsky et al., 2024), DeFT (Yao et al., 2025).
A fixed number of programs reads on the device what there is to do: one captured graph serves every grouping.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import runtime
from nanovllm.kernels.attention_variant import AttentionVariant, Hooks
from nanovllm.kernels.cache_layout import ROWS, CacheLayout
from nanovllm.kernels.prefill_attention import attend_to_tile
from nanovllm.kernels.runtime import LOG2_E, next_power_of_2, tl, triton, use_triton

MAX_PARTS = 16  # partial results of a sequence
PARTS = tl.constexpr(MAX_PARTS)  # for kernels
QUERY_TILE = 64  # query rows: members times their heads for one kv head


class SharedPrefixes(NamedTuple):
    """
    What the sequences of a decode step begin with in common, on the device. A task is four numbers: the place
    of its first member in `members`, the number of its members, begin and end of its tokens. It computes
    attention over these tokens of its first member's block table, for all its members; each member's partial
    result lies at the member's place. Its tasks cover a sequence's first `prefix_lens` tokens, each once.
    """

    prefix_lens: Tensor  # int32 [batch]
    num_parts: Tensor  # int32 [batch], partial results of each
    parts: Tensor  # int32 [batch, MAX_PARTS], where these lie
    members: Tensor  # int32 [places], which sequence of the batch
    tasks: Tensor  # int32 [tasks, 4]
    num_tasks: Tensor  # int32 [1]


def members_per_task(heads_per_kv_head: int) -> int:
    """The most members that a task may have."""
    return max(1, QUERY_TILE // heads_per_kv_head)


def can_share(config_heads: int, heads: int, head_dim: int, element_size: int, device: torch.device) -> bool:
    """
    Whether a layer with so many heads for one kv head can compute tasks that were made for `config_heads`.
    Of other layers' members not all would have a place in a tile, or the tile none in shared memory.
    """
    fits = head_dim * element_size <= 1024 or runtime.has_hopper_shared_memory(device)
    return fits and members_per_task(config_heads) <= members_per_task(heads)


class PrefixSizes(NamedTuple):
    """As in `PrefillSizes`. The strides are elements: of rows from a token to the next, else from a block."""

    KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    DIM_PAD: int
    BLOCK_SIZE: int
    QUERY_TILE: int
    KEY_TILE: int
    TOKEN_STRIDE: int
    HEAD_STRIDE: int


def shared_prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    variant: AttentionVariant,
    shared: SharedPrefixes,
    layout: CacheLayout = ROWS,
) -> tuple[Tensor, Tensor]:
    """
    The partial results, float32 [places, heads, head_dim], and log2 of each softmax's denominator, float32
    [places, heads]; the other arguments are those of `paged_decode_attention`.
    """
    if not use_triton(q):
        return shared_prefix_attention_torch(q, k_cache, v_cache, block_tables, variant, shared, layout)
    _, heads, head_dim = q.shape
    block_size, kv_heads = layout.page_sizes(k_cache, head_dim)
    group, places = heads // kv_heads, len(shared.members)
    partial = torch.empty(places, heads, head_dim, dtype=torch.float32, device=q.device)
    log_sums = torch.empty(places, heads, dtype=torch.float32, device=q.device)
    dim_pad = max(runtime.MIN_DOT_SIZE, next_power_of_2(head_dim))
    element_size = max(q.element_size(), k_cache.element_size())
    key_tile, num_warps, num_stages, programs = _tile(dim_pad, element_size, q.device)
    query_tile = max(QUERY_TILE, next_power_of_2(group))
    strides = k_cache.stride()[-3:-1]
    sizes = PrefixSizes(kv_heads, group, head_dim, dim_pad, block_size, query_tile, key_tile, *strides)
    _shared_prefix_kernel[(programs * runtime.num_multiprocessors(q.device),)](
        q, k_cache, v_cache, block_tables, partial, log_sums, shared.members, shared.tasks, shared.num_tasks,
        variant.scale * LOG2_E, *q.stride()[:2], block_tables.stride(0),
        SIZES=sizes, HOOKS=Hooks(score=variant.hooks.score, constants=variant.hooks.constants),
        LOAD=layout.load, num_warps=num_warps, num_stages=num_stages, **runtime.overlap_options(q.device),
    )  # fmt: skip
    return partial, log_sums


def _tile(dim_pad: int, element_size: int, device: torch.device) -> tuple[int, int, int, int]:
    """Keys of a tile, warps, pipeline stages, programs of a multiprocessor: measured on Hopper."""
    if element_size > 2:
        return 16, 4, 1, 2
    if not runtime.has_hopper_shared_memory(device):
        return (64, 4, 2, 1) if dim_pad <= 128 else (32 if dim_pad <= 256 else 16, 4, 1, 1)
    return {64: (64, 4, 3, 3), 128: (64, 4, 3, 2)}.get(dim_pad, (32, 4, 2, 1))


def shared_prefix_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    variant: AttentionVariant,
    shared: SharedPrefixes,
    layout: CacheLayout = ROWS,
) -> tuple[Tensor, Tensor]:
    _, heads, head_dim = q.shape
    partial = torch.zeros(len(shared.members), heads, head_dim, dtype=torch.float32, device=q.device)
    log_sums = torch.zeros(len(shared.members), heads, dtype=torch.float32, device=q.device)
    for task in shared.tasks[: int(shared.num_tasks)]:
        first, count = task[:2].tolist()
        places = slice(first, first + count)
        members = shared.members[places]
        span = block_tables[members[:1]], task[2:3], task[3:4]
        keys, values, seen = layout.read(k_cache, v_cache, *span, head_dim)
        # [kv_heads, tokens, head_dim], and query rows [kv_heads, members * heads per kv head, head_dim]
        keys, values = keys[0], values[0]
        queries = q[members].unflatten(1, (len(keys), -1)).transpose(0, 1).flatten(1, 2)
        out, log_sum = variant.attend_and_sum(queries, keys, values, seen)
        partial[places] = out.unflatten(1, (count, -1)).transpose(0, 1).flatten(1, 2)
        log_sums[places] = log_sum.unflatten(1, (count, -1)).transpose(0, 1).flatten(1, 2) * LOG2_E
    return partial, log_sums


def add_parts_torch(
    out: Tensor, log_sums: Tensor, partial: Tensor, prefix_log_sums: Tensor, shared: SharedPrefixes
) -> Tensor:
    """
    To each sequence's attention over its own tokens, `out` [batch, heads, head_dim] with the log of the
    denominators [batch, heads], what `shared_prefix_attention` returns. -> Attention over both.
    """
    most = int(shared.num_parts.max())
    is_part = torch.arange(most, device=out.device) < shared.num_parts[:, None]  # [batch, parts]
    places = torch.where(is_part, shared.parts[:, :most], 0)
    prefix_log_sums = (prefix_log_sums[places] / LOG2_E).masked_fill(~is_part[..., None], float("-inf"))
    weights = torch.cat([log_sums[:, None], prefix_log_sums], dim=1).softmax(1).nan_to_num()
    results = torch.cat([out[:, None].float(), partial[places]], dim=1)  # [batch, 1 + parts, heads, head_dim]
    return (results * weights[..., None]).sum(1).to(out.dtype)


class WithPrefix(AttentionVariant):
    """
    A layer's variant for sequences of which a prefix has been computed: attention reads the tokens behind it,
    and adds the partial results of `shared_prefix_attention` to its own.
    """

    reads_few = True

    def __init__(self, layer: AttentionVariant, shared: SharedPrefixes, partial: Tensor, log_sums: Tensor):
        super().__init__(layer.scale)
        assert layer.hooks.first_token is None and layer.hooks.end is None
        self.layer, self.shared, self.partial, self.log_sums = layer, shared, partial, log_sums

    @functools.cached_property
    def own_sums(self) -> Tensor:
        """Of the reference: logs of the denominators over each sequence's own tokens [batch, heads]."""
        size = len(self.shared.prefix_lens), self.log_sums.shape[1]
        return self.log_sums.new_full(size, float("-inf"))

    @property
    def hooks(self) -> Hooks:
        score = score_as_layer if self.layer.hooks.score is not None else None
        return Hooks(prefix_len, score, begin_with_part, add_parts, constants=self.layer.hooks)

    @property
    def extras(self) -> tuple[Any, ...]:
        prefix_lens, num_parts, parts, *_ = self.shared
        return prefix_lens, num_parts, parts, self.partial, self.log_sums, self.layer.extras

    def first_token(self, context_lens: Tensor) -> Tensor:
        return self.shared.prefix_lens

    def attend_decode(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Any) -> Tensor:
        out, log_sums = self.layer.attend_and_sum(q, k, v, mask, self.layer.first_sums(q.shape[1]))
        self.own_sums[rows] = log_sums.flatten(1, 2)
        return out

    def finish_decode(self, out: Tensor) -> Tensor:
        return add_parts_torch(out, self.own_sums, self.partial, self.log_sums, self.shared)


@triton.jit(do_not_specialize=["table_stride"])
def _shared_prefix_kernel(
    q, k_cache, v_cache, block_tables, partial, log_sums, members, tasks, num_tasks,
    scale_log2, q_batch_stride, q_head_stride, table_stride,
    SIZES: tl.constexpr, HOOKS: tl.constexpr, LOAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program computes every n-th pair of a task and a kv head, if there are n programs."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    STRIDE: tl.constexpr = SIZES.TOKEN_STRIDE
    QUERY_TILE: tl.constexpr = SIZES.QUERY_TILE
    DIM_PAD: tl.constexpr = SIZES.DIM_PAD
    KEY_TILE: tl.constexpr = SIZES.KEY_TILE
    row = tl.arange(0, QUERY_TILE)
    dim = tl.arange(0, DIM_PAD)
    for item in range(tl.program_id(0), tl.load(num_tasks) * SIZES.KV_HEADS, tl.num_programs(0)):
        kv_head = item % SIZES.KV_HEADS
        task = tasks + item // SIZES.KV_HEADS * 4
        first, count, begin, end = tl.load(task), tl.load(task + 1), tl.load(task + 2), tl.load(task + 3)
        place = first + row // SIZES.GROUP
        head = kv_head * SIZES.GROUP + row % SIZES.GROUP
        is_row = row < count * SIZES.GROUP
        member = tl.load(members + place, mask=is_row, other=0).to(tl.int64)
        inside = is_row[:, None] & (dim < SIZES.HEAD_DIM)[None, :]
        q_address = q + member[:, None] * q_batch_stride + head[:, None] * q_head_stride + dim[None, :]
        query = tl.load(q_address, mask=inside, other=0.0)

        table = block_tables + tl.load(members + first).to(tl.int64) * table_stride
        k_head = k_cache + kv_head * SIZES.HEAD_STRIDE
        v_head = v_cache + kv_head * SIZES.HEAD_STRIDE
        cache = k_head, v_head, table, STRIDE, STRIDE
        last_key = tl.full([QUERY_TILE], -1, tl.int32) + end
        seen = end, begin, None, last_key
        highest = tl.full([QUERY_TILE], float("-inf"), tl.float32)
        total = tl.zeros([QUERY_TILE], tl.float32)
        acc = tl.zeros([QUERY_TILE, DIM_PAD], tl.float32)
        aligned = tl.cdiv(begin, KEY_TILE) * KEY_TILE
        whole_end = end // KEY_TILE * KEY_TILE
        # Whole tiles first, then a part of one in front of them and one behind them, if there are such.
        for start in range(aligned, whole_end, KEY_TILE):
            highest, total, acc = attend_to_tile(
                query, cache, seen, start, highest, total, acc, scale_log2, SIZES, HOOKS, LOAD, False
            )
        for start in range(begin // KEY_TILE * KEY_TILE, begin, KEY_TILE):
            highest, total, acc = attend_to_tile(
                query, cache, seen, start, highest, total, acc, scale_log2, SIZES, HOOKS, LOAD, True
            )
        for start in range(tl.maximum(aligned, whole_end), end, KEY_TILE):
            highest, total, acc = attend_to_tile(
                query, cache, seen, start, highest, total, acc, scale_log2, SIZES, HOOKS, LOAD, True
            )

        out_row = place.to(tl.int64) * SIZES.KV_HEADS * SIZES.GROUP + head
        out_address = partial + out_row[:, None] * SIZES.HEAD_DIM + dim[None, :]
        tl.store(out_address, acc / total[:, None], mask=inside)
        tl.store(log_sums + out_row, highest + tl.log2(total), mask=is_row)


@triton.jit
def prefix_len(extras, seq, context_len, HOOKS: tl.constexpr):
    return tl.load(extras[0] + seq)


@triton.jit
def score_as_layer(score, HOOKS: tl.constexpr):
    LAYER: tl.constexpr = HOOKS.constants
    return LAYER.score(score, LAYER)


@triton.jit
def begin_with_part(
    extras, seq, is_first, row, head, dim, highest, total, SIZES: tl.constexpr, HOOKS: tl.constexpr
):
    """Load the first partial result before it is needed, after the layer's own `begin`."""
    LAYER: tl.constexpr = HOOKS.constants
    if LAYER.begin is not None:
        highest, total, _ = LAYER.begin(
            extras[5], seq, is_first, row, head, dim, highest, total, SIZES, LAYER
        )
    used_parts = tl.where(is_first, tl.load(extras[1] + seq), 0)
    prefix_out = extras[3] + (head[None, :] * SIZES.HEAD_DIM + dim[:, None])
    prefix_log_sums = extras[4] + head
    places = extras[2] + seq * PARTS
    part, log_sum = load_part(places, 0, used_parts, prefix_out, prefix_log_sums, row, dim, SIZES)
    return highest, total, (used_parts, places, prefix_out, prefix_log_sums, part, log_sum)


@triton.jit
def add_parts(kept, row, dim, highest, total, acc, SIZES: tl.constexpr, HOOKS: tl.constexpr):
    """Add the partial results to that of the first split."""
    used_parts, places, prefix_out, prefix_log_sums, part, log_sum = kept
    highest, total, acc = add_part(part, log_sum, highest, total, acc)
    for i in range(1, used_parts):
        part, log_sum = load_part(places, i, used_parts, prefix_out, prefix_log_sums, row, dim, SIZES)
        highest, total, acc = add_part(part, log_sum, highest, total, acc)
    return highest, total, acc


@triton.jit
def load_part(places, i, used_parts, prefix_out, prefix_log_sums, row, dim, SIZES: tl.constexpr):
    """The i-th partial result of groups and log2 of its softmax's denominator (-inf: there is none)."""
    HEADS: tl.constexpr = SIZES.KV_HEADS * SIZES.READERS * SIZES.HEADS
    first_row = tl.load(places + i, mask=i < used_parts, other=0).to(tl.int64) * HEADS
    is_there = row < tl.where(i < used_parts, SIZES.HEADS, 0)
    inside = is_there[None, :] & (dim < SIZES.HEAD_DIM)[:, None]
    part = tl.load(prefix_out + first_row * SIZES.HEAD_DIM, mask=inside, other=0.0)
    return part, tl.load(prefix_log_sums + first_row, mask=is_there, other=float("-inf"))


@triton.jit
def add_part(part, log_sum, highest, total, acc):
    new_highest = tl.maximum(tl.maximum(highest, log_sum), -1.0e30)  # finite where nothing was seen
    shrink = tl.exp2(highest - new_highest)
    weight = tl.exp2(log_sum - new_highest)
    return new_highest, total * shrink + weight, acc * shrink[None, :] + part * weight[None, :]
