"""The progress bar of a call."""

import functools
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm

MakeBar = Callable[..., tqdm]
no_bar = functools.partial(tqdm, disable=True)


class Progress:
    """Counts completions that have ended, and shows the speed of the last steps."""

    def __init__(self, total: int | None, make_bar: MakeBar):
        self.bar = make_bar(total=total, desc="Generating", dynamic_ncols=True)
        self.speed, self.seconds = {"Prefill": "-", "Decode": "-"}, 0.0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.close()

    def count(self, num_ended: int, num_tokens: int, seconds: float) -> None:
        """Add what a step has returned, and how long it took."""
        self.seconds += seconds
        if num_tokens:  # else the step has only launched what the next one collects
            phase = "Prefill" if num_tokens > 0 else "Decode"
            self.speed[phase] = f"{abs(num_tokens) / self.seconds:.0f}tok/s"
            self.seconds = 0.0
        self.bar.set_postfix(self.speed, refresh=False)
        self.bar.update(num_ended)
