"""CUDA graphs: a step's kernels recorded once, and from then on launched as one.

Knows nothing of what is recorded, which must depend on nothing but the device's memory.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], Callable[[], Any]]  # enqueues its first part, and returns what enqueues the second
RESERVED_BYTES = 512 << 20  # for what graphs take beside their tensors
capture_lock = threading.Lock()  # engines in several threads record on the same stream


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """
    One for all engines on the device, because the workspace that cuBLAS takes for each stream is never freed.
    Not torch's own, which is one for all devices.
    """
    return torch.cuda.Stream(device)


def get_graph_sizes(max_num_seqs: int) -> list[int]:
    """
    Batch sizes that CUDA graphs are made for. A batch is padded to the next one, which costs little: in small
    batches most of the time goes into reading the weights.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class CudaGraphs:
    """All share one pool of memory: one runs at a time, and overwrites the results of the others."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pool = self._pool_owner = None

    def reserve(self, num_bytes: int) -> None:
        """
        Begin the shared memory as one piece in which the largest step fits. Else it would grow with every
        larger batch, which does not fit into the pieces that smaller ones have left.
        """
        self._pool_owner, _ = self._record(
            lambda: torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        )

    def capture(self, step: Step, in_two: bool) -> Step:
        """
        Record a step: in one graph, or in two, between which the host does something. Returns a step that
        does the same, but what it computes overwrites that of the last time. Meanwhile the GPU goes on with
        what was enqueued before. Memory that is to outlast the graph is taken `on_default_stream`.
        """
        first, result = self._record(step if in_two else lambda: step()())
        second = None
        if in_two:
            second, result = self._record(result)

        def finish() -> Any:
            if second is not None:
                second.replay()
            return result

        def replay() -> Callable[[], Any]:
            first.replay()
            return finish

        return replay

    def _record(self, step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph, pool = torch.cuda.CUDAGraph(), self._pool
        self._pool = None  # a pool in which a capture has failed cannot be used again
        try:
            with capture_lock, torch.cuda.stream(capture_stream(self.device)):
                if torch.cuda.mem_get_info(self.device)[0] < RESERVED_BYTES:
                    torch.cuda.empty_cache()  # which a capture cannot do, and which waits for the device
                # Relaxed: kernels may be loaded, and other threads may go on using the device.
                graph.capture_begin(pool, capture_error_mode="relaxed")
                try:
                    result = step()
                finally:
                    graph.capture_end()
        except torch.AcceleratorError as error:
            # A failed capture leaves torch's generator in the state of a capture, in which it cannot draw.
            generator = torch.cuda.default_generators[self.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise RuntimeError(
                "a CUDA graph could not be captured. If another thread of the program waits for the whole "
                "device (torch.cuda.synchronize), which CUDA forbids meanwhile, let it wait for a stream or "
                f"an event; enforce_eager=True does without graphs. {error}"
            ) from error
        self._pool = graph.pool()
        return graph, result
