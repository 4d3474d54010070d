"""What one request asks for: how its tokens are drawn and when it ends. Knows nothing about the engine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """
    temperature:                divides the logits before sampling; 0 is greedy decoding.
    max_tokens:                 most tokens to generate, at least 1.
    ignore_eos:                 go on to `max_tokens` even when an end-of-sequence token is drawn.
    seed:                       draw the same tokens for the same prompt every time.
    n:                          completions of the prompt; each draws for itself, with a seed of its own.
    stop:                       a text or several that end the completion, which then ends before it.
    stop_token_ids:             token ids that end the completion, whose text then ends before it.
    include_stop_str_in_output: leave in the text what ended it by `stop` or `stop_token_ids`.
    skip_special_tokens:        leave special tokens out of the text.
    detokenize:                 make a text at all; without, it is empty, and `stop` cannot be used.

    Raises ValueError with the offending value.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, Real):
            raise ValueError(f"temperature must be a number, got {self.temperature!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature must be finite and at least 0 (0 is greedy), got {self.temperature!r}"
            )
        for name in ("max_tokens", "n"):
            if not _is_integer(getattr(self, name), 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {getattr(self, name)!r}")
        if self.seed is not None and not _is_integer(self.seed, 0, MAX_SEED):
            raise ValueError(f"seed must be None or an integer from 0 to {MAX_SEED}, got {self.seed!r}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple(self.stop)
        if stop is None or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be a text or a list of texts, none of them empty, got {self.stop!r}")
        if stop and not self.detokenize:
            raise ValueError(f"stop needs a text to look at, but detokenize is False; got stop={self.stop!r}")
        token_ids = _as_tuple(self.stop_token_ids)
        if token_ids is None or not all(_is_integer(token_id, 0) for token_id in token_ids):
            raise ValueError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(map(int, token_ids)))


def _is_integer(value: Any, low: int, high: float = math.inf) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= value <= high


def _as_tuple(values: Any) -> tuple | None:
    """None, which asks for nothing, as an empty tuple; what is no collection of values as None."""
    if values is None:
        return ()
    return tuple(values) if isinstance(values, (list, tuple, set, frozenset)) else None
