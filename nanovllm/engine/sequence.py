"""One request on its way through the engine: its tokens, how far they are computed, and its blocks."""

from enum import Enum, auto
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from nanovllm.sampling_params import MAX_TOKENS, SamplingParams

TOKEN_BYTES = 8  # of a packed token


def pack(token_ids: list[int]) -> bytes:
    """The ids as little-endian int64."""
    return np.array(token_ids, dtype="<i8").tobytes()


def unpack(packed: bytes) -> np.ndarray:
    return np.frombuffer(packed, dtype="<i8")


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """
    `token_ids` is the prompt followed by the completion so far. `num_tokens` may be ahead of it by the tokens
    that steps still under way will draw. The KV cache holds (or will, once those steps are done) the first
    `num_computed_tokens`, of which `num_cached_tokens` were found there at admission; the current
    step computes the next `num_scheduled_tokens`. A decoding sequence has exactly one token left to compute:
    its last.
    """

    _ids = count()

    def __init__(
        self, token_ids: list[int], sampling_params: SamplingParams = SamplingParams(),
        block_size: int = 256, seed: int = 0,
    ):  # fmt: skip
        self.seq_id = next(Sequence._ids)
        self.status = SequenceStatus.WAITING
        self.token_ids = list(token_ids)
        self.num_tokens = len(self.token_ids)
        self.num_prompt_tokens = self.num_tokens
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_prompt_tokens_cached: int | None = None  # num_cached_tokens of its first admission
        # The scheduler lowers this to what fits.
        self.max_num_tokens = self.num_prompt_tokens + (sampling_params.max_tokens or MAX_TOKENS)

        # Where it lives
        self.block_size = block_size
        self.block_table: list[int] = []
        self.num_released_blocks = 0  # leading blocks that no layer reads again: they were given back
        self.block_hashes: list[int] = []  # chained hashes of the full blocks seen so far
        self.row = -1  # of the devices' tables, while running

        # What it asks for
        self.sampling_params = sampling_params
        self.wanted = 0  # the logits processors that it wants: bit i is the i-th of Parts
        self.own: dict[str, Any] = {}  # by logits processor, what it has read of the request
        self.seed = seed  # this and a token's position decide the noise it is drawn with
        self.leader: Sequence | None = None  # first completion of the same prompt, if this is another
        self.end_token_ids: frozenset[int] = frozenset()  # set by the scheduler, which knows eos

        # What its result says
        self.finish_reason: str | None = None  # "stop", "length", "abort" or "error"
        self.stop_reason: str | int | None = None  # the stop text or stop token id that ended it
        self.error: Exception | None = None  # that ended it, if the sequence is to blame for it
        self.text: str | None = None  # of the completion, if a stop text has cut it

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, key: int | slice) -> int | list[int]:
        return self.token_ids[key]

    def __repr__(self) -> str:
        tokens = f"{self.num_prompt_tokens}+{self.num_completion_tokens}"
        return f"Sequence({self.seq_id}, {self.status.name}, {tokens} tokens)"

    @property
    def is_finished(self) -> bool:
        return self.status == SequenceStatus.FINISHED

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @cached_property
    def packed_prompt(self) -> bytes:
        """The prompt as int64, which are hashed and compared much faster than a list of Python's integers."""
        return pack(self.prompt_token_ids)

    def packed(self, begin: int, end: int) -> bytes:
        """Tokens begin..end, as far as they are known."""
        if end <= self.num_prompt_tokens:
            return self.packed_prompt[begin * TOKEN_BYTES : end * TOKEN_BYTES]
        return pack(self.token_ids[begin:end])

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_cached_blocks(self) -> int:
        return self.num_cached_tokens // self.block_size

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)

    @property
    def num_blocks_at_most(self) -> int:
        """If it draws all its tokens, of which the last is never written to the cache."""
        return -(-(self.max_num_tokens - 1) // self.block_size)

    @property
    def may_end_early(self) -> bool:
        """Whether it can end before it has max_num_tokens."""
        return bool(self.end_token_ids or self.sampling_params.stop)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def restart(self) -> None:
        """Be a waiting request again that has its tokens and nothing computed, whatever a failed step did."""
        self.status = SequenceStatus.WAITING
        self.num_tokens = len(self.token_ids)
        self.num_cached_tokens = self.num_computed_tokens = self.num_scheduled_tokens = 0
        self.block_table, self.num_released_blocks = [], 0
        self.row = -1
        del self.block_hashes[self.num_tokens // self.block_size :]
        self.finish_reason = self.stop_reason = self.text = None

    def block(self, i: int) -> list[int]:
        """Token ids of the i-th block; the last one may be shorter than a block."""
        if not 0 <= i < self.num_blocks:
            raise IndexError(f"block {i} of a sequence that has {self.num_blocks}")
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        """`num_tokens` counts it already if `Scheduler.advance` has counted its step."""
        self.token_ids.append(token_id)
        self.num_tokens = max(self.num_tokens, len(self.token_ids))
