"""Records CUDA graphs before they are needed: a thread does it while the host waits for the GPU.

A batch shrinks as its sequences end, so a first run needs a graph for each of the engine's sizes. Recording
one takes the host some 20 ms, in which the GPU would have nothing to do.
"""

from collections.abc import Hashable
from threading import Thread
from typing import Any

from nanovllm.engine.interfaces import Observer


class RecordAhead(Observer):
    """
    Beside decode steps on one GPU, records the largest missing graph for fewer sequences, for steps of the
    same kind otherwise. Steps that go through the model in Python wait for it, since layers and logits
    processors may keep something between two calls. If recording fails it stops: the step that needs the
    graph will say why.

    Meanwhile nobody may wait for the whole device, which CUDA forbids then. So it is done in `generate` alone
    and is over when that returns, and not where an engine has somebody's own parts.
    """

    watches = True

    def __init__(self) -> None:
        self._thread = Thread()
        self._has_failed = False

    def started(self, engine: Any) -> None:
        self._engine = engine

    def launching(self, step: Any) -> None:
        runner, batch = self._engine.model_runner, step.batch
        is_alone = self._engine.is_generating and not self._engine.config.extensions
        if runner.graphs is None or runner.ranks is not None or self._has_failed or not is_alone:
            return
        needed = next(size for size in runner.graph_sizes if size >= batch.num_sequences)
        kinds = [(size, batch.plan_key, batch.wanted) for size in runner.graph_sizes if size <= needed]
        missing = [kind for kind in kinds if kind not in runner.decoded]
        if batch.is_prefill or kinds[-1] in missing:
            self.stop()
        elif missing and not self._thread.is_alive():
            self._thread = Thread(target=self._record, args=(runner, missing[-1]))
            self._thread.start()

    def _record(self, runner: Any, kind: Hashable) -> None:
        try:
            with runner.on_device():
                runner.capture_cudagraph(kind)
        except Exception:
            self._has_failed = True

    def after_step(self, step: Any) -> None:
        if not self._engine.in_flight:  # the last one
            self.stop()

    def stop(self) -> None:
        """Wait until nothing is recorded."""
        if self._thread.is_alive():
            self._thread.join()

    cleared = stop
