"""The tables of a cascade plan: what rank 0's planner writes, and what the kernels of every rank read."""

from typing import Any, NamedTuple

MAX_PARTIALS = 16  # partial results of a sequence


class CascadePlan(NamedTuple):
    """
    Which prefixes a decode step reads once, in tables on the device. A query is a sequence that shares a
    prefix. A work item, (first query, queries, begin, end), computes attention over these tokens of its first
    query's block table, for all its queries; the partial result of each has the query's index. Together they
    cover a sequence's first `prefix_lens` tokens, each once.
    """

    prefix_lens: Any  # int32 [batch]
    num_partials: Any  # int32 [batch]
    partials: Any  # int32 [batch, MAX_PARTIALS], indices of each sequence's partial results
    queries: Any  # int32 [queries], which sequence of the batch
    work_items: Any  # int32 [items, 4]
    num_work_items: Any  # int32 [1]


def plan_shapes(batch_size: int) -> CascadePlan:
    """Of the tables. Small batches may have more queries for each sequence, to keep the device busy."""
    max_queries = max(4 * batch_size, min(16 * batch_size, 512))
    max_items = max(2 * batch_size, 64)
    each = (batch_size,)
    return CascadePlan(each, each, (batch_size, MAX_PARTIALS), (max_queries,), (max_items, 4), (1,))
