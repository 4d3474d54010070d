"""Compiles the kernels of prefill and decode side by side, in other processes, while the weights load.

Without it the first `generate` on a machine whose kernel cache is empty would compile them one after another.
What there is to compile follows from the calls themselves: forked processes go through the engine's steps on
the CPU without computing products, and compile each kernel instead of launching it. The engine finds the
kernels in Triton's cache on disk. A kernel that is missing there is compiled when it is launched.
"""

import ctypes
import functools
import gc
import hashlib
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.engine.cuda_graphs import get_graph_sizes
from nanovllm.engine.interfaces import Observer
from nanovllm.engine.memory import largest_batch
from nanovllm.kernels import runtime
from nanovllm.kernels.prefill_attention import SHORT_QUERIES
from nanovllm.kernels.runtime import triton
from nanovllm.utils.loader import pack_weights
from nanovllm.utils.torch_defaults import dtype_lock

TIMEOUT = 30  # seconds; far more than all kernels take
MAX_PROCESSES = 16
SMALL = 1 << 20  # bytes
MARKER = "all-compiled"
PR_SET_PDEATHSIG = 1  # of Linux's prctl


class CompileAhead(Observer):
    """
    Rank 0 compiles the kernels that all ranks launch, every other rank the few that differ from rank 0's.
    `make_group` makes, for a rank, a group that launches the kernels of the engine's without other ranks.
    """

    def __init__(self, config: Config, make_group: Callable[[int], Group]):
        self._config, self._make_group = config, make_group
        self._processes: list[int] = []
        self._deadline = 0.0

    def starting(self, rank: int, make_runner: Callable[..., Any]) -> None:
        """Begin, unless the cache has all kernels of an engine like this one."""
        config, device = self._config, self._config.device_of(rank)
        if device.type != "cuda" or not torch.version.cuda or not runtime.HAVE_TRITON:
            return
        self._deadline = time.monotonic() + TIMEOUT
        driver = triton.runtime.driver.active  # a forked process cannot make it, nor ask for the properties
        properties = runtime.gpu_properties(device)
        settle_keys()
        self._cache = triton.runtime.cache.get_cache_manager(_fingerprint(properties, rank, config))
        if self._cache.has_file(MARKER):
            return
        self._reports, report = os.pipe()
        launches = functools.partial(launch_every_kernel, config, make_runner, self._make_group(rank))
        count = min(os.cpu_count() or 1, MAX_PROCESSES) if rank == 0 else 1
        with dtype_lock:  # a fork while another thread holds it would leave it locked for ever
            for part in range(count):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
                    process = os.fork()
                if process == 0:
                    _compile_part(launches, driver, properties, report, rank, part, count)
                self._processes.append(process)
        os.close(report)

    def before_warmup(self, model: nn.Module) -> None:
        """Wait until what the start needs is compiled, or it takes too long."""
        missing = len(self._processes)
        while missing:
            seconds = max(0, self._deadline - time.monotonic())
            if not select.select([self._reports], [], [], seconds)[0]:
                return
            reported = len(os.read(self._reports, missing))
            missing = missing - reported if reported else 0  # 0: all have ended

    def before_first_decode(self) -> None:
        """Wait until all is compiled, or it takes too long."""
        if not self._processes:
            return
        if not any([self._exit_status(process) for process in self._processes]):
            self._cache.put("", MARKER, binary=False)  # the next engine of this kind has nothing to do
        os.close(self._reports)
        self._processes = []

    def _exit_status(self, process: int) -> int:
        try:
            while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
                if time.monotonic() > self._deadline:
                    os.kill(process, signal.SIGKILL)
                time.sleep(0.002)
        except ChildProcessError:  # the user's program has waited for it
            return -1
        return ended[1]

    def stop(self) -> None:
        """Stop compiling."""
        self._deadline = 0.0
        self.before_first_decode()


def settle_keys() -> None:
    """
    Compute the keys of the functions that kernels and their hooks call. Triton 3.6 leaves constants of a
    function that has no key yet out of its callers' keys, by which the cache knows them: these would depend
    on which kernels had been compiled before, in this process or a forked one.
    """
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("nanovllm.")]
    for function in [function for module in modules for function in vars(module).values()]:
        if isinstance(function, triton.JITFunction):
            _settle_callees(function)


def _settle_callees(function: Any) -> None:
    for name in function.fn.__code__.co_names:
        callee = function.fn.__globals__.get(name)
        if isinstance(callee, triton.JITFunction):
            _settle_callees(callee)  # before its own key, for the same reason
            _ = callee.cache_key  # computed once, and kept by Triton


def _fingerprint(properties: Any, rank: int, config: Config) -> str:
    """A key of all that decides which kernels there are."""
    names = [
        "kvcache_block_size",
        "max_num_seqs",
        "tensor_parallel_size",
        "attention_backend",
        "enable_prefix_caching",
        "quantization",
        "exact",
    ]
    options = [config.torch_dtype, config.kv_cache_torch_dtype, *(getattr(config, name) for name in names)]
    facts = torch.__version__, triton.__version__, properties, rank, options, vars(config.hf_config)
    digest = hashlib.sha256(repr(facts).encode())
    for file in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _zeroed_if_small(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Small tensors may be indices, which no kernel writes here: they are 0. Large ones take no memory."""

    def made(*args: Any, **options: Any) -> torch.Tensor:
        tensor = make(*args, **options)
        return tensor.zero_() if tensor.nbytes <= SMALL else tensor

    return made


def _compile_part(
    launches: Callable[[], Iterator[None]],
    driver: Any,
    properties: Any,
    report: int,
    rank: int,
    part: int,
    num_parts: int,
) -> NoReturn:
    """Compile every num_parts-th of the kernels that `launches` launches, in this process, which ends."""
    try:
        gc.freeze()  # memory of a GPU that was garbage at the fork could not be freed here
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the engine, however that ends
        torch.set_num_threads(1)  # the others' are not there after a fork
        linear = F.linear  # tiny ones are computed, which extensions/transformers/faster.py looks at
        F.linear = lambda x, weight, bias=None: (
            linear(x, weight, bias) if weight.numel() < 64 else x.new_empty(*x.shape[:-1], len(weight))
        )
        torch._scaled_mm = lambda a, b, out_dtype, **_: a.new_empty(len(a), b.shape[1], dtype=out_dtype)
        torch.empty_like = _zeroed_if_small(torch.empty_like)
        torch.empty = torch.zeros = _zeroed_if_small(torch.empty)
        target = triton.backends.compiler.GPUTarget("cuda", 10 * properties.major + properties.minor, 32)
        driver.get_current_target = lambda: target
        driver.get_current_device = lambda: 0
        driver.get_current_stream = lambda _device: 0
        runtime.compiling_for = properties
        runtime.TRITON_DEVICES.add("cpu")
        compile_kernel, numbers = triton.JITFunction.run, {}

        def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            dtypes = [getattr(arg, "dtype", None) for arg in args]
            number = numbers.setdefault((kernel.__name__, *dtypes, *options.items()), len(numbers))
            if number % num_parts == part and (rank == 0 or "RANK" in options):
                compiled = compile_kernel(kernel, *args, grid=grid, warmup=True, **options)
                driver.launcher_cls(compiled.src, compiled.metadata)  # in some versions a C program

        triton.JITFunction.run = compile_instead
        for _ in launches():
            os.write(report, b".")
        os._exit(0)
    finally:
        os._exit(1)


@torch.inference_mode()
def launch_every_kernel(config: Config, make_runner: Callable[..., Any], group: Group) -> Iterator[None]:
    """
    Launch every kernel that prefill and decode have, through a ModelRunner that is on the CPU. Yields when
    the kernels of the warm-up are through. Two layers launch all.
    """
    model = config.hf_config
    windows = (*dict.fromkeys(model.windows), *model.windows)[:2]  # unlike ones, if there are
    experts = model.experts
    if experts is not None:  # one of two layers has them
        experts = replace(experts, mlp_only_layers=experts.mlp_only_layers[:1])
    model = replace(model, num_hidden_layers=len(windows), windows=windows, experts=experts)
    config = replace(config, hf_config=model)
    runner = make_runner(config, group=group, device=torch.device("cpu"))
    runner.build()
    pack_weights(runner.model)
    short = largest_batch(config, num_tokens=16)  # kernels do not depend on how many
    lengths = [length + SHORT_QUERIES for length in short.lens_q]
    tokens = np.zeros(sum(lengths), dtype=np.int64)
    inputs = dict(token_ids=tokens, positions=tokens, slot_mapping=tokens.astype(np.int32))
    long = short._replace(lens_q=lengths, lens_k=lengths, **inputs)
    # Those of prefill alone launch no kernel that these do not.
    processors = enumerate(runner.parts.logits_processors)
    kernels = [1 << i for i, processor in processors if not processor.prefill_only]
    runner.run(long._replace(wanted=sum(kernels) & ~runner.waiting))
    *smaller, largest = get_graph_sizes(config.max_num_seqs)
    plan = runner.backend.largest_plan
    runner.decode_step((largest, plan, 0))()
    yield
    # Which kernels there are depends on one logits processor, or on two of which one changes the dtype.
    for wanted in (0, *kernels, *map(sum, combinations(kernels, 2))):
        if runner.run(short._replace(wanted=wanted)) is None:
            runner.sample({})
    for batch in (short, long):  # some keys are in the cache
        messages = {"prefix_cache": np.zeros((1, 3), dtype=np.int64)}
        lengths = [length + 1 for length in batch.lens_k]
        runner.run(batch._replace(wanted=0, lens_k=lengths, messages=messages))
    for size, key in [*product(smaller, {False, plan}), (largest, False)]:
        runner.decode_step((size, key, 0))()
