"""What every kernel file needs around its kernel: Triton if it is installed, and where a tensor's work runs.

Importing a kernel file must work on a machine that has neither Triton nor a GPU, so `triton` and `tl` are stand-ins
there: the decorated functions exist and nothing ever calls them.
"""

import functools
import os

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False

    class _TritonStandIn:
        constexpr = None

        @staticmethod
        def jit(function=None, **_options):
            return function if function is not None else (lambda decorated: decorated)

    triton = tl = _TritonStandIn()

INTERPRETED = (
    os.environ.get("TRITON_INTERPRET") == "1"
)  # Triton's own switch: kernels run as Python, on the CPU
NUM_COUNTERS = 1 << 16


def use_triton(tensor: Tensor) -> bool:
    """Whether work on this tensor goes through the Triton kernel (else through the torch twin)."""
    return HAVE_TRITON and (tensor.is_cuda or INTERPRETED)


@functools.cache
def _device_facts(index: int | None) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.major


def num_multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at the least; a small stand-in for the interpreter."""
    return _device_facts(device.index)[0] if device.type == "cuda" else 4


def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may start while its predecessor drains (programmatic dependent launch, Hopper and later).

    A kernel launched so must wait (`gdc_wait`) before it touches anything but weights.
    """
    return device.type == "cuda" and _device_facts(device.index)[1] >= 9


@functools.cache
def arrival_counters(device: torch.device) -> Tensor:
    """Zeroed counters with which the last of several programs finds out that it is the last; it zeroes its own again.

    Made once per device and outside of graph capture: a captured allocation would belong to that graph.
    """
    assert not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()), (
        "run once before capturing"
    )
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
