"""What the progress bar of a call shows."""

from typing import Any

LOOK = {"desc": "Generating", "dynamic_ncols": True}  # options of the bar


class Progress:
    """Counts in a bar the completions that have ended, and shows the speed of the engine's last steps."""

    def __init__(self, bar: Any, engine: Any):
        self.bar, self.engine = bar, engine
        self.speed, self.seconds = {"Prefill": "-", "Decode": "-"}, engine.seconds

    def show(self, finished: list[Any], num_tokens: int) -> None:
        """What a step has returned, see `LLMEngine.step`."""
        if num_tokens:  # else the step has only launched what the next one collects
            phase = "Prefill" if num_tokens > 0 else "Decode"
            seconds = self.engine.seconds - self.seconds
            self.speed[phase] = f"{abs(num_tokens) / seconds:.0f}tok/s"
            self.seconds += seconds
        self.bar.set_postfix(self.speed, refresh=False)
        self.bar.update(len(finished))
