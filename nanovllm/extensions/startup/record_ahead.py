"""Records CUDA graphs before they are needed: a thread does it while the host waits for the GPU.

A batch shrinks as its sequences end, so a first run needs a graph for each of the engine's sizes. Recording
one takes the host some 20 ms, in which the GPU would have nothing to do.
"""

from collections.abc import Callable, Hashable
from threading import Event, Thread
from typing import Any

from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.engine.interfaces import Observer
from nanovllm.extensions.startup.compile_ahead import CompileAhead
from nanovllm.extensions.startup.short_prefills import ShortPrefills


def observers(config: Config, make_group: Callable[[int], Group]) -> list[Observer]:
    """
    Who compiles kernels ahead; and who records graphs ahead and of prefills, on one GPU and where nobody's
    own parts run between the engine's steps.
    """
    found: list[Observer] = [CompileAhead(config, make_group)]
    if config.device == "cpu" or config.tensor_parallel_size > 1 or config.extensions:
        return found
    found.append(RecordAhead())
    if config.hf_config.architectures:  # transformers' models may do in Python what a graph would leave out
        found.append(ShortPrefills())
    return found


class RecordAhead(Observer):
    """
    Beside decode steps whose batch has begun to shrink, records the largest missing graph for fewer
    sequences, for steps of the same kind otherwise. Steps that go through the model in Python wait for
    it, since layers and logits processors may keep something between two calls. If recording fails it stops:
    the step that needs the graph will say why.

    Meanwhile nobody may wait for the whole device, which CUDA forbids then. So it is done in `generate` alone
    and is over when that returns.
    """

    watches = True

    def __init__(self) -> None:
        self._is_idle = Event()  # not `Thread.join`, after whose interruption a thread may pass for ended
        self._is_idle.set()
        self._has_failed = self._is_shrinking = False
        self._num_sequences = 0  # of the last step, if it was a decode step

    def started(self, engine: Any) -> None:
        self._engine = engine

    def launching(self, step: Any) -> None:
        runner, batch = self._engine.model_runner, step.batch
        count = 0 if batch.is_prefill else batch.num_sequences
        self._is_shrinking |= 0 < count < self._num_sequences
        self._num_sequences = count
        is_able = runner.graphs is not None and not self._has_failed
        if not (is_able and self._engine.is_generating and count):
            return self.wait()
        needed = next(size for size in runner.graph_sizes if size >= count)
        rest = batch.plan_key, batch.wanted  # of a kind of steps, behind its size
        if (needed, *rest) not in runner.decoded:
            self.wait()  # it may be the one that is being recorded
        elif self._is_shrinking and self._is_idle.is_set():
            smaller = [(size, *rest) for size in runner.graph_sizes if size < needed]
            missing = [kind for kind in smaller if kind not in runner.decoded]
            if missing:
                self._begin(runner, missing[-1])

    def _begin(self, runner: Any, kind: Hashable) -> None:
        thread = Thread(target=self._record, args=(runner, kind))
        try:
            self._is_idle.clear()
            thread.start()
        except RuntimeError:  # there are too many threads
            self._has_failed = True
        finally:
            if thread.ident is None:  # it was not started: Ctrl-C may have come before
                self._is_idle.set()

    def _record(self, runner: Any, kind: Hashable) -> None:
        if self._is_idle.is_set():  # it was given up before it began
            return
        try:
            with runner.on_device():
                runner.capture_cudagraph(kind)
        except Exception:
            self._has_failed = True
        finally:
            self._is_idle.set()

    def after_step(self, step: Any) -> None:
        if not self._engine.in_flight:  # the last one
            self.stop()

    def stop(self) -> None:
        self.wait()
        self._is_shrinking = False  # the next call begins with a prefill

    def wait(self) -> None:
        """Until nothing is recorded."""
        self._is_idle.wait()

    cleared = stop
