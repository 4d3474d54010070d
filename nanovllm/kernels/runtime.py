"""What every kernel file needs around its kernel: Triton if it is installed, and where a tensor's work runs.

Importing a kernel file must work on a machine that has neither Triton nor a GPU, so `triton` and `tl` are
stand-ins there: the decorated functions exist and nothing ever calls them.
"""

import functools
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False

    triton = tl = SimpleNamespace(
        constexpr=lambda value: value,
        jit=lambda function=None, **_options: function or (lambda decorated: decorated),
    )

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run as Python on CPUs
IS_INTERPRETED = tl.constexpr(INTERPRETED)  # for kernels
NUM_COUNTERS = 1 << 16  # as many as a grid can have rows
ROW_PADDING = 128
MIN_DOT_SIZE = 16  # the smallest side of a matrix that `tl.dot` multiplies
LOG2_E = 1.4426950408889634  # exp(x) is computed as exp2(x * LOG2_E), which GPUs have an instruction for

# The properties of the GPU that this process compiles kernels for, while its own tensors are on the CPU
# (extensions/startup/compile_ahead.py); None in all other processes.
compiling_for: Any = None


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda or compiling_for is not None


def use_triton(tensor: Tensor) -> bool:
    """Whether work on this tensor goes through the Triton kernel (else through the torch twin)."""
    return HAVE_TRITON and (is_on_gpu(tensor) or INTERPRETED)


_cuda_properties = functools.cache(torch.cuda.get_device_properties)


def gpu_properties(device: torch.device) -> Any:
    """torch's properties of a GPU, also of one that is only compiled for; None for a CPU."""
    return _cuda_properties(device) if device.type == "cuda" else compiling_for


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; a few in the interpreter, where tests are to see work divided."""
    properties = gpu_properties(device)
    return properties.multi_processor_count if properties else 4


def has_hopper_shared_memory(device: torch.device) -> bool:
    """Whether a program may use 220 KB of shared memory. Earlier GPUs and those for desktops have less."""
    properties = gpu_properties(device)
    return properties is None or properties.shared_memory_per_multiprocessor >= 220_000


def gpu_supports(device: torch.device, major: int, minor: int) -> bool:
    """Whether a GPU is NVIDIA's and has the instructions of this compute capability."""
    properties = gpu_properties(device)
    return bool(properties and torch.version.cuda and (properties.major, properties.minor) >= (major, minor))


def gpu_supports_fp8(device: torch.device) -> bool:
    """Whether a GPU converts and multiplies numbers in 8-bit floating point."""
    return gpu_supports(device, 8, 9)


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Launch options that let a kernel start before the kernels launched earlier have ended.

    GPUs can do that from Hopper on (programmatic dependent launch). Such a kernel may read weights and the
    step's inputs (positions, slots, lengths, block tables) at once, because no kernel launched with these
    options writes them. Before it reads anything else, and before it writes, it must call `gdc_wait`; only
    the inputs of a kernel that used `wait_before_next` may be read by the next one at once, too.
    """
    properties = gpu_properties(device)
    if properties and torch.version.cuda and properties.major >= 9:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


def empty_padded(rows: int, width: int, like: Tensor) -> Tensor:
    """An uninitialised [rows, width], with memory for a whole number of tiles of rows.

    The GPU's copy engine takes 1 to 2 us longer for a tile in which rows are missing.
    """
    padded = cdiv(rows, ROW_PADDING) * ROW_PADDING
    return torch.empty(padded, width, dtype=like.dtype, device=like.device)[:rows]


@functools.cache
def arrival_counters(device: torch.device) -> Tensor:
    """Counters, all 0, by which programs that share a result know when all parts of it are stored.

    Each program adds 1 after it has stored its part; the last one combines the parts and sets the counter
    back to 0. Allocated once per device and outside of graph capture: memory allocated during a capture would
    belong to that graph.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not capturing, "a kernel must have run once before it is captured"
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Where kernels overlap (`overlap_options`): let the next one start, and wait for all before this one."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_before_next(OVERLAP: tl.constexpr):
    """The same in the other order: the next kernel starts when the inputs of this one are there."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(start, size):
    """Start to load `size` bytes, from the address `start` on, into the L2 cache."""
    part = tl.cdiv(size, 128 * 16) * 16
    begin = tl.arange(0, 128) * part
    prefetch_each(start + begin, tl.minimum(part, size - begin))


@triton.jit
def prefetch_each(address, size):
    """The same for many addresses with a size each, all multiples of 16; sizes of 0 or less load nothing."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.gt.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
