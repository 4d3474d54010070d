"""What cannot be exact is refused by name, before weights are read."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.extensions.exact import options
from nanovllm.extensions.exact.options import check_exact
from nanovllm.extensions.ranks import peer_group
from tiny_checkpoints import edit_json, make_checkpoint, one_thread  # noqa: F401

OPTIONS = dict(device="cpu", num_kvcache_blocks=4, kvcache_block_size=16, exact=True)


def checkpoint(folder: Path, architecture: str, **overrides) -> str:
    """One that is refused later if at all: it has no weights."""
    make_checkpoint(folder, architecture, **overrides)
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


def assert_refused(model: str, told: str, **given) -> None:
    with pytest.raises(ValueError, match="exact.*" + re.escape(told)):
        LLM(model, **OPTIONS | given)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("exact", 1, "must be True or False, got 1"),
        ("attention_backend", "flash", "attention_backend to be one of ['auto', 'torch'], got 'flash'"),
        ("attention_backend", "triton", "attention_backend to be one of ['auto', 'torch'], got 'triton'"),
        ("dtype", "float16", "dtype to be one of ['float32', 'bfloat16'], got 'float16'"),
        ("quantization", "int4", "the weights' format to be one of ['dense', 'fp8'], got 'int4'"),
    ],
)
def test_an_option_that_is_not_exact_is_refused(qwen3, name, value, told):
    assert_refused(qwen3, told, **{name: value})


@pytest.mark.parametrize("architecture", ["gemma3", "gpt_oss"])
def test_a_model_that_is_not_exact_is_refused(tmp_path, architecture):
    assert_refused(checkpoint(tmp_path, architecture), "the architecture to be one of ['Qwen3ForCausalLM'")


def test_a_window_is_refused_unless_it_is_longer_than_every_sequence(tmp_path):
    model = str(make_checkpoint(tmp_path, "mistral", sliding_window=40, max_position_embeddings=64))
    assert_refused(model, "max_model_len of at most 40, which is the model's window")
    LLM(model, **OPTIONS, max_model_len=40).exit()


@pytest.mark.parametrize(
    "stored",
    [
        dict(quant_method="mxfp4"),
        dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=True),
    ],
    ids=lambda stored: stored["quant_method"],
)
def test_weights_of_a_format_that_is_not_exact_are_refused(tmp_path, stored):
    model = checkpoint(tmp_path, "qwen3")
    edit_json(tmp_path / "config.json", quantization_config=stored)
    assert_refused(model, "the weights' format to be one of ['dense', 'fp8'], got ")


@pytest.fixture
def on_gpus(tmp_path, monkeypatch):
    """A complete Config of a model with heads of 256 on GPUs, with these options."""
    model = make_checkpoint(tmp_path, "qwen3", head_dim=256)

    def make(**given):
        config, _ = LLM.open_model(str(model), OPTIONS | given)
        monkeypatch.setattr(Config, "device_of", lambda self, rank: torch.device("cuda", rank))
        return config

    return make


def test_what_kernels_of_gpus_cannot_do_is_refused(on_gpus, monkeypatch):
    with pytest.raises(ValueError, match="exact=True needs dtype .*'bfloat16', 'float16'.*got 'float32'"):
        check_exact(on_gpus(dtype="float32"), {"dense"})
    config = on_gpus(dtype="bfloat16")
    with pytest.raises(ValueError, match="exact=True needs head_dim of at most 128, got 256"):
        check_exact(config, {"dense"})
    with pytest.raises(ValueError, match="exact=True needs kv_cache_dtype .* got 'float32'"):
        check_exact(replace(config, kv_cache_dtype="float32"), {"dense"})
    monkeypatch.setattr(options, "HAVE_TRITON", False)
    with pytest.raises(ValueError, match="exact=True needs the package triton"):
        check_exact(config, {"dense"})


@pytest.mark.parametrize(("exact", "ranks"), [(True, 4), (True, 2), (False, 4)])
def test_more_than_two_gpus_must_write_into_each_others_memory(on_gpus, monkeypatch, exact, ranks):
    monkeypatch.setattr(peer_group, "has_peer_access", lambda config: False)
    config = on_gpus(exact=exact, tensor_parallel_size=ranks)
    if exact and ranks > 2:
        with pytest.raises(ValueError, match="exact=True needs tensor_parallel_size of at most 2, got 4"):
            peer_group.group_maker(config)
    else:
        peer_group.group_maker(config)


def test_all_else_works_and_is_off_unless_it_is_asked_for(tmp_path):
    model = str(make_checkpoint(tmp_path, "qwen3"))
    for given in (dict(attention_backend="torch"), dict(kv_cache_dtype="int8"), dict(quantization=None)):
        with LLM(model, **OPTIONS | given) as llm:
            assert llm.config.exact
    with LLM(model, device="cpu", num_kvcache_blocks=4) as llm:
        assert not llm.config.exact
