"""The progress bar of a call."""

from collections.abc import Callable

from tqdm.auto import tqdm

from nanovllm.utils.validation import check

MakeBar = Callable[..., tqdm]


def bar_maker(use_tqdm: bool | MakeBar) -> MakeBar | None:
    """What makes the progress bar, if there is to be one."""
    is_good = isinstance(use_tqdm, bool) or callable(use_tqdm)
    check(is_good, "use_tqdm must be True, False or what makes a bar as tqdm does", use_tqdm)
    return use_tqdm if callable(use_tqdm) else tqdm if use_tqdm else None


class Progress:
    """Counts completions that have ended, and shows the speed of the last steps."""

    def __init__(self, total: int | None, make_bar: MakeBar | None):
        hidden = make_bar is None
        options = dict(total=total, desc="Generating", dynamic_ncols=True)
        self.bar = tqdm(disable=True) if hidden else make_bar(**options)
        self.speed, self.seconds = {"Prefill": "-", "Decode": "-"}, 0.0

    def count(self, num_ended: int, num_tokens: int, seconds: float) -> None:
        """Add what a step has returned, and how long it took."""
        self.seconds += seconds
        if num_tokens:  # else the step has only launched what the next one collects
            phase = "Prefill" if num_tokens > 0 else "Decode"
            self.speed[phase] = f"{abs(num_tokens) / self.seconds:.0f}tok/s"
            self.seconds = 0.0
        self.bar.set_postfix(self.speed, refresh=False)
        self.bar.update(num_ended)
