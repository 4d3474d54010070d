"""What attention must know about the current step and the model's signature does not carry.

The runner sets it before a forward pass and resets it afterwards; it is the only ambient state of the engine.
Every thread has its own, since each may drive an engine.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Context:
    """
    is_prefill:   the step computes prompts (of any length each) rather than one token per sequence.
    cu_seqlens_q: int32 [sequences + 1], where each sequence's computed tokens begin. Prefill only.
    cu_seqlens_k: int32 [sequences + 1], the same for the keys they attend to. Prefill only.
    max_seqlen_q, max_seqlen_k: the longest of each. Prefill only.
    slot_mapping: int32 [tokens], KV cache slot that each token writes; -1 writes nothing.
    context_lens: int32 [sequences], tokens in the cache after this step's write. Decode only.
    block_tables: int32 [sequences, blocks]; in prefill only if some keys come from the cache.
    """

    is_prefill: bool = False
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    slot_mapping: torch.Tensor | None = None
    context_lens: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None


_context: ContextVar[Context] = ContextVar("context", default=Context())  # noqa: B039


def get_context() -> Context:
    return _context.get()


def set_context(is_prefill: bool, **fields: Any) -> None:
    """The fields are those of `Context`."""
    _context.set(Context(is_prefill, **fields))


def reset_context() -> None:
    _context.set(Context())
