"""The processes that compile kernels ahead launch all of them between them, and need no GPU to do so."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from cases import slow
from compiled_kernels import SHARED_MEMORY
from quantised_checkpoints import PACKERS, mxfp4, quantise

from nanovllm.extensions.experts.kernels.grouped_gemm import DENSE_TILES
from nanovllm.extensions.experts.kernels.grouped_mxfp4 import MXFP4_TILES
from nanovllm.extensions.quantised.kernels.grouped_codes import CODE_TILES, LINEAR_TILES
from nanovllm.extensions.quantised.kernels.grouped_int4 import INT4_TILES
from nanovllm.extensions.startup.compile_ahead import settle_keys
from nanovllm.kernels.runtime import HAVE_TRITON
from tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")

# Where a kernel would be compiled for a GPU its name is printed.
SETUP = """
import functools, gc, os, sys
from types import SimpleNamespace
import torch, triton

torch.set_num_threads(1)
torch.version.cuda = "13.0"  # a torch for CPUs will do
from nanovllm.extensions.safety.options import ExtendedConfig
from nanovllm.extensions.startup.compile_ahead import _compile_part, launch_every_kernel
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.assembly import open_checkpoint
from nanovllm.extensions.ranks.peer_group import stand_in

model, rank, size, *desktop = sys.argv[1:]
rank, size, (cache, kernels) = int(rank), int(size), desktop or ("auto", "none")
config = ExtendedConfig(
    model, device="cpu", dtype="bfloat16", max_num_seqs=300, kv_cache_dtype=cache, tensor_parallel_size=size,
    activation_dtype=os.environ.get("ACTIVATIONS", "auto"),
)
config = config.with_checkpoint(open_checkpoint(config))
gpu = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=233472, major=9, minor=0)
driver = SimpleNamespace(launcher_cls=lambda source, metadata: None)
compile_for_real = triton.JITFunction.run

def compile_kernel(kernel, *args, grid, warmup, **options):
    assert warmup
    dtypes = [str(getattr(arg, "dtype", None)) for arg in args]
    print("compiles", part, kernel.__name__, dtypes, sorted(map(str, options.items())), flush=True)
    return SimpleNamespace(src=None, metadata=None)

def compile_for_desktop(kernel, *args, **options):
    is_attention = kernel.__name__.endswith(("_decode_kernel", "_prefill_kernel", "_shared_prefix_kernel"))
    if is_attention or kernels == "all":
        compiled = compile_for_real(kernel, *args, **options)
        print("compiles", part, kernel.__name__, compiled.metadata.shared, flush=True)
    return SimpleNamespace(src=None, metadata=None)

triton.JITFunction.run = compile_kernel
if desktop:
    triton.JITFunction.run = compile_for_desktop
    triton.runtime.driver.set_active(driver)
    gpu = SimpleNamespace(multi_processor_count=82, shared_memory_per_multiprocessor=102400, major=8, minor=6)
from nanovllm.assembly import assemble

make_runner = functools.partial(ModelRunner, parts=assemble(config))
"""
PARTS = """
reports, report = os.pipe()
os.set_blocking(reports, False)  # a process that has failed reports nothing
group = stand_in(config, rank)

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        os._exit(9)  # as memory of a GPU, which cannot be freed after a fork

gc.disable()
Garbage()

def launches():
    gc.collect()
    return launch_every_kernel(config, make_runner, group)

for part in range(2):
    child = os.fork()
    if child == 0:
        _compile_part(launches, driver, gpu, report, rank, part, 2)
    print("status", os.waitpid(child, 0)[1], "reports", os.read(reports, 9), flush=True)
"""
WHOLE_START = """
from dataclasses import replace
from nanovllm.extensions.startup import compile_ahead
from nanovllm.kernels import runtime

part = "any"
runtime.gpu_properties = lambda device: gpu
driver_of_gpu = SimpleNamespace(driver=SimpleNamespace(active=driver), cache=triton.runtime.cache)
compile_ahead.triton = SimpleNamespace(**{**vars(triton), "runtime": driver_of_gpu})
for _ in range(2):
    parts = assemble(replace(config, device="cuda"))
    for observer in parts.observers:
        observer.starting(rank, functools.partial(ModelRunner, parts=parts))
        observer.before_warmup(None)
        observer.before_first_decode()
        observer.stop()
    print("started", flush=True)
"""


def compiled(folder, *args: int | str) -> list[set[str]]:
    """What each of two processes compiles, as kernels with their options."""
    command = [sys.executable, "-c", SETUP + PARTS, str(folder), *map(str, args)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout.count("status 0 reports b'.'") == 2, run.stdout + run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("compiles")]
    return [{line.split(maxsplit=2)[2] for line in lines if line.split()[1] == part} for part in "01"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), head_dim=64, vocab_size=257)


def test_all_kernels_are_compiled_each_by_one_process(folder):
    first, second = compiled(folder, 0, 1)
    assert not first & second and abs(len(first) - len(second)) < 3
    names = {line.split()[0] for line in first | second}
    assert names >= {
        "_rms_norm_kernel", "_qk_norm_rope_store_kernel", "_prefill_kernel", "_activate_and_mul_kernel",
        "_decode_inputs_kernel", "_decode_kernel",
        "_gemv_kernel", "_small_gemm_kernel", "_fused_linear_kernel",
        "_sample_kernel", "_threshold_kernel", "_rules_kernel", "_token_flags_kernel",
        "_copy_kernel", "_shared_prefix_kernel", "_mask_kernel", "_logprobs_kernel",
    }  # fmt: skip


@pytest.mark.parametrize("architecture", ["qwen3_moe", slow("qwen2_moe"), slow("glm4_moe")])
def test_the_kernels_of_a_mixture_of_experts_are_compiled_too(tmp_path, architecture):
    sizes = dict(head_dim=64, hidden_size=256, vocab_size=257)
    if architecture == "glm4_moe":  # in the last layer alone
        sizes |= dict(num_hidden_layers=4, first_k_dense_replace=3)
    folder = make_checkpoint(tmp_path, architecture, **sizes)
    names = [line.split()[0] for part in compiled(folder, 0, 1) for line in part]
    expected = {
        "_choose_kernel": 1,
        "_gates_kernel": 2,  # with and without a norm in front
        "_sum_kernel": 1,
        "_sort_kernel": len({tile.BLOCK_M for tile in DENSE_TILES.values()}),
        "_quantise_kernel": 1,
    }
    expected["_grouped_kernel"] = 2 * len(DENSE_TILES)  # two products
    assert {name: names.count(name) for name in expected} == expected


@pytest.mark.parametrize("name, architecture", [slow("mxfp4", "gpt_oss"), ("pack 4", "qwen3_moe")])
def test_the_kernels_of_quantised_experts_are_compiled_too(tmp_path, name, architecture):
    sizes = dict(head_dim=64, hidden_size=128, intermediate_size=128, vocab_size=257)
    if architecture == "qwen3_moe":
        sizes["moe_intermediate_size"] = 128
    floats = make_checkpoint(tmp_path / "floats", architecture, **sizes)
    folder = quantise(floats, tmp_path / "packed", mxfp4() if name == "mxfp4" else PACKERS[name])
    names = [line.split()[0] for part in compiled(folder, 0, 1) for line in part]
    is_mxfp4 = name == "mxfp4"
    expected = {
        "_gemv_codes_kernel": 2,
        "_grouped_mxfp4_kernel": 2 * len(MXFP4_TILES) * is_mxfp4,
        "_grouped_codes_kernel": 2 * (len(CODE_TILES) + len(LINEAR_TILES)) * (not is_mxfp4),  # attention's
    }
    assert {name: names.count(name) for name in expected} == expected
    assert not {"_grouped_kernel", "_gates_kernel"} & {*names}
    assert ("_dequantise_kernel" in names) != is_mxfp4  # of other layers' weights, for prefill


def test_the_kernels_of_int4_with_rounded_inputs_are_compiled_too(tmp_path, monkeypatch):
    sizes = dict(head_dim=64, hidden_size=256, moe_intermediate_size=128, vocab_size=257)
    floats = make_checkpoint(tmp_path / "floats", "qwen3_moe", **sizes)
    folder = quantise(floats, tmp_path / "packed", PACKERS["pack 4, channel"])
    monkeypatch.setenv("ACTIVATIONS", "fp8")
    names = [line.split()[0] for part in compiled(folder, 0, 1) for line in part]
    assert names.count("_grouped_int4_kernel") == 2 * len(INT4_TILES) + 2  # of experts, and of attention
    assert {"_grouped_codes_kernel", "_dequantise_kernel"} <= {*names}  # of few rows, and of very many


@pytest.mark.parametrize("rank, size", [(0, 1), (1, 2)])
def test_a_start_compiles_all_kernels_and_the_next_one_none(folder, tmp_path, rank, size):
    command = [sys.executable, "-c", SETUP + WHOLE_START, str(folder), str(rank), str(size)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    first, second, rest = run.stdout.split("started")
    names = set(re.findall(r"compiles any (\w+)", first))
    of_ranks = {"_all_reduce_kernel", "_best_token_kernel"}
    if rank == 0:
        assert "_prefill_kernel" in names and not names & of_ranks, run.stdout + run.stderr
    else:  # other ranks compile only what is their own
        assert names == of_ranks, run.stdout + run.stderr
    assert not (second + rest).strip()


@pytest.mark.parametrize(
    "head_dim, cache", [(128, "auto"), slow(128, "int8"), slow(256, "auto"), slow(256, "int8")]
)
def test_attention_fits_into_the_shared_memory_of_a_desktop_gpu(tmp_path, head_dim, cache):
    folder = make_checkpoint(tmp_path, head_dim=head_dim, vocab_size=257)
    first, second = compiled(folder, 0, 1, cache, "of attention")
    shared = [(name, int(size)) for name, size in map(str.split, first | second)]  # bytes
    assert len({name for name, _ in shared}) == 3
    assert max(size for _, size in shared) <= SHARED_MEMORY, shared


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, name, cache",
    [
        ("qwen3", "", "auto"),
        ("qwen3_moe", "pack 4", "int8"),
        ("gpt_oss", "mxfp4", "auto"),
        ("gpt_oss", "mxfp4", "int8"),
    ],
)
def test_every_kernel_is_one_that_the_installed_triton_can_compile(tmp_path, architecture, name, cache):
    sizes = dict(head_dim=64, hidden_size=128, intermediate_size=128, vocab_size=257)
    if architecture == "qwen3_moe":
        sizes["moe_intermediate_size"] = 128
    folder = make_checkpoint(tmp_path / "floats", architecture, **sizes)
    if name:
        folder = quantise(folder, tmp_path / "packed", mxfp4() if name == "mxfp4" else PACKERS[name])
    first, second = compiled(folder, 0, 1, cache, "all")
    assert len({line.split()[0] for line in first | second}) > 13
    assert max(int(line.split()[1]) for line in first | second) <= SHARED_MEMORY


def test_functions_that_hooks_of_extensions_call_have_keys_before_any_kernel_is_compiled(
    tmp_path, monkeypatch
):
    """Else the key of the hook would depend on what was compiled before (Triton 3.6)."""
    text = """
from nanovllm.kernels.runtime import tl, triton

TWICE = tl.constexpr(2.0)


@triton.jit
def doubled(score):
    return score * TWICE


@triton.jit
def hook(score, HOOKS):
    return doubled(score)
"""
    (tmp_path / "extension.py").write_text(text)
    spec = importlib.util.spec_from_file_location("nanovllm.extensions.of_a_test", tmp_path / "extension.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, spec.name, module)
    assert module.doubled.hash is None
    settle_keys()
    assert module.doubled.hash is not None
    found, module.hook.hash = module.hook.cache_key, None
    assert module.hook.cache_key == found
