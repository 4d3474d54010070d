"""Records decode steps while the GPU is busy with a long prefill.

Recording a CUDA graph takes the host as long as launching all of the step's kernels one by one. While a
prefill keeps the GPU busy that costs nothing, and the first run is nearly as fast as all others.
"""

from typing import Any

MIN_TOKENS = 8192  # with which a prefill step takes longer than a recording


def capture_ahead(engine: Any, step: Any) -> None:
    """
    If the step behind this one, which has just been launched, is a long prefill: record one size of those
    that the batch will pass through as its sequences end, the smallest that is missing.
    """
    runner, (*_, newest) = engine.model_runner, (step, *engine.in_flight)
    if newest is step or newest.num_tokens < MIN_TOKENS:
        return
    wanted = newest.batch.wanted & engine.batches.of_decode
    sizes = [size for size in runner.graph_sizes if size <= len(engine.scheduler.running)]
    if missing := [size for size in sizes if (size, False, wanted) not in runner.decoded]:
        runner.call("capture_cudagraph", (missing[0], False, wanted))
