"""Hooks of attention: what a launch with them is known by in Triton's cache on disk."""

import importlib.util

import pytest

from nanovllm.kernels.attention_variant import Hooks
from nanovllm.kernels.decode_attention import _decode_kernel
from nanovllm.kernels.kv_store import StoreHooks
from nanovllm.kernels.runtime import HAVE_TRITON, INTERPRETED

pytestmark = pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="needs Triton's compiler")


def hook(folder, name: str, line: str):
    """A hook of always the same module and name, out of a file of its own."""
    file = folder / f"{name}.py"
    head = "from nanovllm.kernels.runtime import triton\n\n\n@triton.jit\ndef hook(score, HOOKS):\n"
    file.write_text(f"{head}    return {line}\n")
    spec = importlib.util.spec_from_file_location("an_extension", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.hook


@pytest.mark.parametrize("record", [Hooks, StoreHooks])
def test_an_edited_hook_is_compiled_anew(tmp_path, record):
    from triton.compiler import ASTSource

    def key(line: str, name: str, **fields) -> str:
        hooks = record(hook(tmp_path, name, line), **fields)
        signature = {argument: "constexpr" for argument in _decode_kernel.arg_names}
        return ASTSource(_decode_kernel, signature, {"HOOKS": hooks}).hash()

    first = key("score * 2.0", "first")
    assert key("score * 2.0", "again") == first
    assert key("score * 3.0", "edited") != first, "by their names the two are the same"
    assert key("score * 2.0", "other", constants=(1,)) != first


def test_hooks_of_hooks_count():
    inner = Hooks(constants=(5,))
    assert Hooks(constants=inner).cache_key != Hooks(constants=Hooks(constants=(6,))).cache_key
