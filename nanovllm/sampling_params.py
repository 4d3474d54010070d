"""What one request asks for: how its tokens are drawn and when it ends. Knows nothing about the engine."""

import math
from dataclasses import dataclass
from numbers import Integral, Real


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """
    temperature: divides the logits before sampling; 0 is greedy decoding.
    max_tokens:  most tokens to generate, at least 1.
    ignore_eos:  go on to `max_tokens` even when an end-of-sequence token is drawn.

    Raises ValueError with the offending value.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, Real):
            raise ValueError(f"temperature must be a number, got {self.temperature!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature must be finite and at least 0 (0 is greedy), got {self.temperature!r}"
            )
        if (
            isinstance(self.max_tokens, bool)
            or not isinstance(self.max_tokens, Integral)
            or self.max_tokens < 1
        ):
            raise ValueError(f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
