"""One completion on its way through the engine: its tokens, how far they are computed, and its blocks.

A `Request` is what is asked for, read and checked; nothing changes it. A `Sequence` is the completion, which
grows.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import Any

from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and how to complete it."""

    token_ids: list[int]
    params: SamplingParams = SamplingParams()
    block_size: int = 256  # of the KV cache
    seed: int | None = 0  # this and a token's position decide its noise; None: the engine draws one
    max_num_tokens: int = 0  # of prompt and completion
    end_token_ids: frozenset[int] = frozenset()  # any of these ends the completion
    wanted: int = 0  # the logits processors that it wants: bit i is the i-th of Parts
    own: dict[str, Any] = field(default_factory=dict)  # what others keep of it: logits processors, by name


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """
    `token_ids` is the prompt followed by the completion so far. `num_tokens` may be ahead of it by the tokens
    that steps still in flight will draw. The KV cache holds (or will, once those steps are done) the first
    `num_computed_tokens`, of which `num_cached_tokens` were found there at admission; the current
    step computes the next `num_scheduled_tokens`. A decoding sequence has exactly one token left to compute:
    its last.
    """

    _ids = count()

    def __init__(self, request: Request):
        self.seq_id = next(Sequence._ids)
        self.request = request
        self.token_ids = list(request.token_ids)
        self.num_prompt_tokens_cached: int | None = None  # num_cached_tokens of its first admission
        self.restart()

    def restart(self) -> None:
        """Be a waiting request that has its tokens and nothing computed, whatever a failed step did."""
        self.status = SequenceStatus.WAITING
        self.num_tokens = len(self.token_ids)
        self.num_cached_tokens = self.num_computed_tokens = self.num_scheduled_tokens = 0
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # chained hashes of the full blocks seen so far
        self.num_released_blocks = 0  # leading blocks that no layer reads again: they were given back
        self.slot = -1  # of the devices' tables, while running
        self.finish_reason: str | None = None  # "stop", "length", "abort" or "error"
        self.stop_reason: str | int | None = None  # the stop text or stop token id that ended it

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, key: int | slice) -> int | list[int]:
        return self.token_ids[key]

    @property
    def sampling_params(self) -> SamplingParams:
        return self.request.params

    @property
    def is_finished(self) -> bool:
        return self.status == SequenceStatus.FINISHED

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_cached_blocks(self) -> int:
        return self.num_cached_tokens // self.request.block_size

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.request.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        return (self.num_tokens - 1) % self.request.block_size + 1

    def block(self, i: int) -> list[int]:
        """Token ids of the i-th block; the last one may be shorter than a block."""
        start = i * self.request.block_size
        return self.token_ids[start : start + self.request.block_size]

    def append_token(self, token_id: int) -> None:
        """`num_tokens` counts it already if `Scheduler.advance` has counted its step."""
        self.token_ids.append(token_id)
        self.num_tokens = max(self.num_tokens, len(self.token_ids))
