"""Compiles kernels for a GPU on a machine with any or none: for a desktop's, or to run them without one."""

import subprocess
import sys
from pathlib import Path

SHARED_MEMORY = 99 << 10  # bytes that a program may take on a desktop GPU, which has little
SETUP = """
import sys
from types import SimpleNamespace
import ptx, torch, triton
from nanovllm.kernels import runtime

def compile_for(major, minor, processors, shared_memory, launch):
    target = triton.backends.compiler.GPUTarget("cuda", 10 * major + minor, 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    ))
    compile_kernel = triton.JITFunction.run

    def compile_instead(kernel, *args, grid, warmup, **options):
        compiled = compile_kernel(kernel, *args, grid=grid, warmup=True, **options)
        launch(kernel, compiled, dict(zip(kernel.arg_names, args)) | options, grid)

    triton.JITFunction.run = compile_instead
    torch.version.cuda = "13.0"
    runtime.compiling_for = SimpleNamespace(
        major=major, minor=minor, multi_processor_count=processors,
        shared_memory_per_multiprocessor=shared_memory,
    )
    runtime.TRITON_DEVICES.add("cpu")
"""
DESKTOP = """
def print_size(kernel, compiled, *rest):
    print(kernel.__name__, compiled.metadata.shared)

compile_for(8, 6, 82, 102400, print_size)
"""
HOPPER = "compile_for(9, 0, 2, 233472, ptx.launch)\n"  # with so few processors, programs have several tiles


def _output_of(code: str) -> str:
    support = Path(__file__).parent
    folders = f"import sys; sys.path[:0] = {[str(support), str(support.parents[1])]}\n"
    child = subprocess.run([sys.executable, "-c", folders + SETUP + code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout


def shared_memory_of(launches: str) -> list[int]:
    """Bytes that each kernel takes on a desktop GPU which this code launches, with tensors of a CPU."""
    return [int(line.split()[1]) for line in _output_of(DESKTOP + launches).splitlines()]


def run_compiled(launches: str) -> None:
    """Run this code, whose kernels are compiled for a Hopper GPU; what they compute, ptx.py does."""
    _output_of(HOPPER + launches)
