"""What attention must know about the current step and the model's signature does not carry.

The runner sets it before a forward pass and resets it afterwards; it is the only ambient state of the engine.
Every thread has its own, since each may drive an engine.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Context:
    """A prefill step computes any number of tokens of each sequence, a decode step one of each."""

    is_prefill: bool = False
    # Prefill only: int32 [sequences + 1], where each sequence's tokens to compute (q) and the keys that they
    # attend to (k) begin; and the most of each that a sequence has.
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    slot_mapping: Tensor | None = None  # int32 [tokens], KV cache slot of each; -1: do not write
    context_lens: Tensor | None = None  # decode only: int32 [sequences], tokens that the cache then has
    block_tables: Tensor | None = None  # int32 [sequences, blocks]; None: no key comes from the cache
    attention_plan: Any = None  # decode only: what the attention back-end has planned for the whole batch


_context = ContextVar("context", default=Context())  # noqa: B039

get_context: Callable[[], Context] = _context.get


def set_context(is_prefill: bool, **fields: Any) -> None:
    """The fields are those of `Context`."""
    _context.set(Context(is_prefill, **fields))


def reset_context() -> None:
    _context.set(Context())
