"""Records CUDA graphs of decode steps while the GPU computes prompts, not when a first step needs them."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.engine.interfaces import Observer
from nanovllm.extensions.startup.compile_ahead import CompileAhead


def observers(config: Config, make_group: Callable[[int], Group]) -> list[Observer]:
    """Who compiles kernels ahead, as `CompileAhead` explains, and who records graphs ahead."""
    compiling = CompileAhead(config, make_group)
    if config.device == "cpu" or config.exact:  # exact steps are of other kinds
        return [compiling]
    return [compiling, CaptureAhead(compiling.is_done)]


class CaptureAhead(Observer):
    """
    Records as many as there is time for until the step in flight ends, largest first: those that the queued
    sequences will need as they end one after another, if they share no prefix and no logits processor wants
    them. `is_compiled` tells whether their kernels are.
    """

    def __init__(self, is_compiled: Callable[[], bool]):
        self._is_compiled = is_compiled
        self._each = 0.03  # seconds that the last one took; before that a guess
        self._spent = 0.0  # seconds of recording since the last step ended

    def started(self, engine: Any) -> None:
        self._engine = engine

    def after_step(self, step: Any) -> None:
        """The next step has begun. It will take about as long as this one did, for which the host waited."""
        now, in_flight = time.perf_counter(), self._engine.in_flight
        spent, self._spent = self._spent, 0.0
        if not in_flight or not in_flight[-1].batch.is_prefill or in_flight[-1].batch.wanted:
            return
        running, runner = in_flight[-1], self._engine.model_runner
        will_decode = any(seq.sampling_params.max_tokens != 1 for seq in running.sequences)
        if runner.graphs is None or not will_decode or not self._is_compiled():
            return
        left = now - running.started + spent
        for kind in self._missing(runner):
            if self._spent + self._each > left:
                return
            runner.call("capture_cudagraph", kind)
            self._each = time.perf_counter() - now - self._spent
            self._spent += self._each

    def _missing(self, runner: Any) -> Iterator[tuple[int, bool, int]]:
        """Kinds of steps, see `ModelRunner`."""
        most = len(self._engine.unfinished)
        largest = next((size for size in runner.graph_sizes if size >= most), runner.graph_sizes[-1])
        for size in reversed(runner.graph_sizes):
            if size <= largest and (size, False, 0) not in runner.decoded:
                yield size, False, 0
