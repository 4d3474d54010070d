"""What all kernel files share: Triton, facts about the GPU, and how a kernel may overlap with the one before.

A kernel file can be imported without Triton and without a GPU. Without Triton, `triton` and `tl` are stubs:
the decorated functions exist, and nothing calls them.
"""

import contextlib
import functools
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run as Python on CPUs

# TRITON_DEVICES: the types of devices whose tensors go through the Triton kernels. Others go through the
# torch references.
try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
    TRITON_DEVICES = {"cuda", "cpu"} if INTERPRETED else {"cuda"}
except ImportError:
    HAVE_TRITON = False
    TRITON_DEVICES = set()

    triton = tl = SimpleNamespace(
        constexpr=lambda value: value,
        jit=lambda function=None, **_options: function or (lambda decorated: decorated),
    )

IS_INTERPRETED = tl.constexpr(INTERPRETED)  # for use inside kernels
MINUS_INF = tl.constexpr(float("-inf"))
NUM_COUNTERS = 1 << 16  # the largest second or third dimension of a grid
ROW_PADDING = 128
MIN_DOT_SIZE = 16  # the smallest side of a matrix that `tl.dot` multiplies
LOG2_E = 1.4426950408889634  # exp(x) is computed as exp2(x * LOG2_E): GPUs have an instruction for exp2

# A process that only compiles kernels has its tensors on the CPU. It sets this to the properties of the GPU
# that it compiles for, and adds the CPU to the devices above.
compiling_for: Any = None


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda or compiling_for is not None


def use_triton(tensor: Tensor) -> bool:
    """Whether work on this tensor goes through the Triton kernel (else through the torch reference)."""
    return tensor.device.type in TRITON_DEVICES


_cuda_properties = functools.cache(torch.cuda.get_device_properties)


def gpu_properties(device: torch.device) -> Any:
    """torch's properties of a GPU, or of the one that this process compiles for; None for a CPU."""
    return _cuda_properties(device) if device.type == "cuda" else compiling_for


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU. In the interpreter 4, so that tests see the work divided."""
    properties = gpu_properties(device)
    return properties.multi_processor_count if properties else 4


def has_hopper_shared_memory(device: torch.device) -> bool:
    """Whether a program may use 220 KB of shared memory. GPUs before Hopper and for desktops have less."""
    properties = gpu_properties(device)
    return properties is None or properties.shared_memory_per_multiprocessor >= 220_000


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Launch options that let a kernel start before the kernels launched earlier have ended.

    GPUs can do that from Hopper on (programmatic dependent launch, PDL). Such a kernel may read weights and
    the step's inputs (positions, slots, lengths, block tables) at once: no kernel launched with these options
    writes them. Before it reads anything else, and before it writes, it must wait (`pdl_wait`). A kernel that
    waits before it lets the next one start (`pdl_wait_then_launch`) has seen its own inputs complete, so the
    next one may read those at once, too.
    """
    properties = gpu_properties(device)
    if properties and properties.major >= 9:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


def empty_padded(rows: int, width: int, like: Tensor) -> Tensor:
    """An uninitialised [rows, width] whose memory holds a whole number of tiles of ROW_PADDING rows.

    Copying a tile into shared memory takes the GPU 1 to 2 us longer if rows are missing.
    """
    return like.new_empty(cdiv(rows, ROW_PADDING) * ROW_PADDING, width)[:rows]


def on_default_stream(device: torch.device) -> contextlib.AbstractContextManager:
    """
    Work there, whatever the thread works on. While another stream is recorded as a CUDA graph, this computes
    at once, in memory that is not the graph's: for what is made once and kept.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.default_stream(device))


@functools.cache
def arrival_counters(device: torch.device) -> Tensor:
    """Counters, all 0, for programs that compute one result together.

    Each program adds 1 after it has stored its part. The last one to arrive combines the parts and sets the
    counter back to 0. They are allocated once per device.
    """
    with on_default_stream(device):
        return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def pdl_wait(OVERLAP):
    """With `overlap_options`: let the next kernel start, then wait for all kernels before this one."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_wait_then_launch(OVERLAP):
    """The same in the other order: the next kernel starts when all kernels before this one have ended."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def masked_load(address, mask):
    """What stands at these addresses; 0 where the mask is false."""
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def prefetch_each(address, size):
    """
    Start loading a block of bytes at each address into the L2 cache. Addresses and sizes are multiples of 16;
    where a size is 0 or less, nothing is loaded.
    """
    asm: tl.constexpr = """{
        .reg .pred some;
        setp.gt.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }"""
    tl.inline_asm_elementwise(asm, "=r,l,r", [address.to(tl.int64), size], tl.int32, is_pure=False, pack=1)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
