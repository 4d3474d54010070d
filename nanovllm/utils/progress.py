"""What the progress bar of a call shows."""

import time
from collections.abc import Callable
from typing import Any

LOOK = {"desc": "Generating", "dynamic_ncols": True}  # options of the bar


class Progress:
    """Runs steps. Counts in a bar the completions that have ended, and shows the speed of the last steps."""

    def __init__(self, bar: Any):
        self.bar = bar
        self.speed, self.seconds = {"Prefill": "-", "Decode": "-"}, 0.0

    def run(self, step: Callable[[], tuple[list[Any], int]]) -> list[Any]:
        """Run a step, see `LLMEngine.step`, and return the requests that it finished."""
        start = time.perf_counter()
        finished, num_tokens = step()
        self.seconds += time.perf_counter() - start
        if num_tokens:  # else the step has only launched what the next one collects
            phase = "Prefill" if num_tokens > 0 else "Decode"
            self.speed[phase] = f"{abs(num_tokens) / self.seconds:.0f}tok/s"
            self.seconds = 0.0
        self.bar.set_postfix(self.speed, refresh=False)
        self.bar.update(len(finished))
        return finished
