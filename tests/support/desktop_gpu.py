"""Compiles kernels for a desktop GPU, which has little shared memory, on a machine with any GPU or none."""

import subprocess
import sys
from pathlib import Path

SHARED_MEMORY = 99 << 10  # bytes that a program may take
COMPILE = """
import sys
from types import SimpleNamespace
import torch, triton
sys.path[:0] = sys.argv[1:]
from nanovllm.kernels import runtime

target = triton.backends.compiler.GPUTarget("cuda", 86, 32)
triton.runtime.driver.set_active(SimpleNamespace(
    get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
))
compile_kernel = triton.JITFunction.run

def compile_instead(kernel, *args, grid, warmup, **options):
    compiled = compile_kernel(kernel, *args, grid=grid, warmup=True, **options)
    print(kernel.__name__, compiled.metadata.shared)

triton.JITFunction.run = compile_instead
torch.version.cuda = "13.0"
runtime.compiling_for = SimpleNamespace(
    major=8, minor=6, multi_processor_count=82, shared_memory_per_multiprocessor=102400
)
runtime.TRITON_DEVICES.add("cpu")
"""


def shared_memory_of(launches: str) -> list[int]:
    """Bytes that each kernel takes which this code launches, with tensors of a CPU."""
    folder = Path(__file__).parent
    command = [sys.executable, "-c", COMPILE + launches, str(folder), str(folder.parents[1])]
    child = subprocess.run(command, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    return [int(line.split()[1]) for line in child.stdout.splitlines()]
