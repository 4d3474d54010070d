"""Checkpoints merged with an adapter, against the merge of the peft library."""

import json
import math
import shutil
import time
from pathlib import Path

import huggingface_hub
import peft
import pytest
import torch
import transformers
from forked_ranks import forked_ranks  # noqa: F401
from open_checkpoints import open_checkpoint
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm import LLM
from nanovllm.assembly import build_model
from nanovllm.utils.loader import load_model
from tiny_checkpoints import EXACT, edit_json, load_reference, make_checkpoint, one_thread  # noqa: F401

PROMPT = list(range(40))
ADAPTERS = {
    "a list of matrices": dict(r=4, target_modules=["q_proj", "v_proj"]),
    "all of them": dict(r=8, lora_alpha=3, target_modules="all-linear", use_rslora=True),
    "a pattern": dict(
        target_modules=r".*\.(q_proj|up_proj)",
        rank_pattern={"layers.1.self_attn.q_proj": 3, ".*0.mlp.up_proj": 1},
        alpha_pattern={"up_proj": 5, "^model.layers.0.self_attn.q_proj": 7},
    ),
    "patterns of alternatives": dict(
        target_modules=["q_proj", "up_proj"],
        rank_pattern={"q|mlp|1.self_attn.q_proj": 3, "up|0.mlp.up_proj": 2},
        alpha_pattern={"up_proj|k_proj": 5, "layers.1|layers.0.self_attn.q_proj": 7},
    ),
    "one layer": dict(target_modules=["k_proj", "gate_proj"], layers_to_transform=[1]),
    "both ends": dict(r=5, target_modules=["embed_tokens", "lm_head", "down_proj"]),
    "whole tensors": dict(target_modules=["o_proj"], modules_to_save=["lm_head", "input_layernorm"]),
}


def make_adapter(folder: Path, target: Path, **settings) -> transformers.PreTrainedModel:
    """Write a random adapter for a checkpoint, and return the merged model."""
    torch.manual_seed(3)
    model = peft.get_peft_model(load_reference(folder), peft.LoraConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(target)
    return model.merge_and_unload().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1)


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("adapter")
    make_adapter(folder, target, **ADAPTERS["all of them"])
    return target


@pytest.mark.parametrize("name", ADAPTERS)
def test_tensors_are_those_that_peft_merges(folder, tmp_path, name):
    expected = make_adapter(folder, tmp_path, **ADAPTERS[name]).state_dict()
    checkpoint = open_checkpoint(folder, lora=tmp_path)
    plain = load_file(folder / "model.safetensors")
    changed = 0
    for tensor in checkpoint.changes[-1](checkpoint.tensors(), nn.Module(), ()):
        assert tuple(tensor.shape) == tuple(expected[tensor.name].shape)
        torch.testing.assert_close(tensor[...], expected[tensor.name], rtol=0, atol=1e-6)
        changed += not torch.equal(tensor[...], plain[tensor.name])
    assert changed >= 2


def logprobs_of(model: transformers.PreTrainedModel) -> list[float]:
    with torch.no_grad():
        found = model(input_ids=torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return found.gather(1, torch.tensor([PROMPT[1:]]).T)[:, 0].tolist()


@pytest.mark.parametrize(
    "name, options",
    [
        ("all of them", dict(tensor_parallel_size=2)),
        ("both ends", dict(model_impl="transformers")),
        ("whole tensors", {}),
    ],
)
def test_an_engine_computes_with_the_merged_weights(folder, tmp_path, name, options):
    expected = logprobs_of(make_adapter(folder, tmp_path, **ADAPTERS[name]))
    with LLM(str(folder), lora=str(tmp_path), **EXACT, **options, num_kvcache_blocks=8) as llm:
        [score] = llm.score([PROMPT], use_tqdm=False)
    assert score["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    assert expected != pytest.approx(logprobs_of(load_reference(folder)), abs=1e-2)


def test_matrices_of_single_experts_are_merged(tmp_path):
    """peft no longer makes such adapters: against the formula."""
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe", seed=1)
    torch.manual_seed(0)
    a, b, factors = torch.randn(8, 3, 32), torch.randn(8, 64, 3), {}
    for i in range(8):
        name = f"base_model.model.model.layers.1.mlp.experts.{i}.down_proj"
        factors |= {f"{name}.lora_A.weight": a[i].clone(), f"{name}.lora_B.weight": b[i].clone()}
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter/adapter_model.safetensors")
    edit_json(tmp_path / "adapter/adapter_config.json", peft_type="LORA", r=3, lora_alpha=6)
    reference = load_reference(folder)
    with torch.no_grad():
        reference.model.layers[1].mlp.experts.down_proj += 2 * b @ a
    with LLM(str(folder), lora=tmp_path / "adapter", **EXACT, num_kvcache_blocks=8) as llm:
        [score] = llm.score([PROMPT], use_tqdm=False)
    assert score["token_logprobs"][1:] == pytest.approx(logprobs_of(reference), abs=1e-3)
    assert score["token_logprobs"][1:] != pytest.approx(logprobs_of(load_reference(folder)), abs=1e-2)


@pytest.mark.parametrize("claimed", [True, False])
@pytest.mark.parametrize("saved", [[], ["attn.c_proj"]], ids=str)
def test_matrices_that_are_stored_transposed_are_merged_so(tmp_path, saved, claimed):
    """Whatever `fan_in_fan_out` claims; one of the matrices is square."""
    config = transformers.GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    targets = ["c_attn", "mlp.c_proj"] if saved else ["c_attn", "c_proj"]
    settings = dict(target_modules=targets, modules_to_save=saved, fan_in_fan_out=True)
    expected = logprobs_of(make_adapter(tmp_path / "model", tmp_path / "adapter", **settings))
    edit_json(tmp_path / "adapter/adapter_config.json", fan_in_fan_out=claimed)
    with LLM(tmp_path / "model", lora=tmp_path / "adapter", **EXACT, num_kvcache_blocks=8) as llm:
        [score] = llm.score([PROMPT], use_tqdm=False)
    assert score["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


def test_a_square_matrix_is_not_merged_transposed_because_the_adapter_says_so(folder, tmp_path):
    expected = logprobs_of(make_adapter(folder, tmp_path, target_modules=["q_proj"]))
    edit_json(tmp_path / "adapter_config.json", fan_in_fan_out=True)
    with LLM(str(folder), lora=tmp_path, **EXACT, num_kvcache_blocks=8) as llm:
        [score] = llm.score([PROMPT], use_tqdm=False)
    assert score["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


def test_weights_are_quantised_after_the_merge(folder, adapter, tmp_path):
    """As from a checkpoint that was merged before."""
    checkpoint = open_checkpoint(folder, lora=adapter)
    merged = {
        tensor.name: tensor[...] for tensor in checkpoint.changes[-1](checkpoint.tensors(), nn.Module(), ())
    }
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file(merged, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = dict(**EXACT, quantization="fp8", num_kvcache_blocks=8)
    found = []
    for model, lora in ((folder, adapter), (tmp_path, None)):
        with LLM(str(model), lora=lora, **options) as llm:
            found.append(llm.score([PROMPT], use_tqdm=False)[0]["token_logprobs"][1:])
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_weights_are_rounded_once(folder, adapter):
    """In bfloat16 they are the merged float32 ones, rounded."""
    checkpoint = open_checkpoint(folder, lora=adapter)
    model = build_model(checkpoint.hf_config()).bfloat16()
    load_model(model, checkpoint)
    merged = {
        tensor.name: tensor[...] for tensor in checkpoint.changes[-1](checkpoint.tensors(), nn.Module(), ())
    }
    found = model.model.layers[1].mlp.down_proj.matrix.weight
    assert torch.equal(found, merged["model.layers.1.mlp.down_proj.weight"].bfloat16())


# What is refused

CONFIG_FAULTS = {
    "peft_type": ["IA3", None, 5],
    "bias": ["all", "lora_only", True],
    "use_dora": [True],
    "lora_bias": [True],
    "init_lora_weights": ["pissa", "olora", 1],
    "target_parameters": [["mlp.experts.gate_up_proj"]],
    "trainable_token_indices": [[1, 2]],
    "layer_replication": [[[0, 1]]],
    "a_field_of_the_future": ["x"],
    "rank_pattern": [["q_proj"], {"(": 4}, "x", {"(?:.|.)" * 30 + "x": 4}, {"(?x:(a+) #\n+)b": 4}],
    "alpha_pattern": [5, {"(a|a)*b": 4}, {".?" * 30 + "x": 4}, {f".*{i}": 4 for i in range(65)}],
}


def refuse(folder: Path, lora: Path, match: str, **options) -> None:
    with pytest.raises(ValueError, match=match):
        LLM(str(folder), lora=lora, device="cpu", num_kvcache_blocks=8, **options)


@pytest.mark.parametrize(
    "field, value",
    [(field, value) for field in CONFIG_FAULTS for value in CONFIG_FAULTS[field]],
    ids=lambda value: str(value)[:60],
)
def test_what_would_need_more_than_a_sum_is_refused_by_name(folder, adapter, tmp_path, field, value):
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(content | {field: value}))
    refuse(folder, tmp_path, f"adapter_config.json: {field}")


@pytest.mark.parametrize("changes", [dict(r=4), dict(r="8"), dict(r=0), dict(lora_alpha="x")], ids=str)
def test_numbers_that_do_not_fit_the_tensors_are_refused(folder, adapter, tmp_path, changes):
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "adapter_config.json", **changes)
    refuse(folder, tmp_path, "must have two numbers|expected rank 4")


NAME = "base_model.model.model.layers.0.self_attn.q_proj"
UNKNOWN = {
    NAME.replace("layers.0", f"layers.{i}") + f".lora_{x}.weight": (8, 8) for i in range(2, 6) for x in "AB"
}
TENSOR_FAULTS = {
    "no part of it": (UNKNOWN, "no tensor to merge with model.layers.2.self_attn.q_proj.* and 1 more"),
    "one factor alone": ({NAME + ".lora_B.weight": None}, "has only lora_A"),
    "another width": ({NAME + ".lora_A.weight": (8, 60)}, r"q_proj.weight has shape \(\d+, 60\), expected"),
    "another rank": ({NAME + ".lora_A.weight": (7, 64)}, "expected rank 8"),
    "three dimensions": ({NAME + ".lora_A.weight": (8, 64, 1)}, "expected rank 8"),
    "a magnitude": ({NAME + ".lora_magnitude_vector": (64,)}, "lora_magnitude_vector is of a kind"),
    "another whole tensor": ({"base_model.model.model.norm.weight": (63,)}, "expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(folder, adapter, tmp_path, name):
    changes, match = TENSOR_FAULTS[name]
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert NAME + ".lora_A.weight" in tensors
    for key, shape in changes.items():
        tensors.pop(key, None)
        if shape is not None:
            tensors[key] = torch.zeros(shape)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    refuse(folder, tmp_path, match)


def test_patterns_are_matched_with_names_of_the_model_only(folder, adapter, tmp_path):
    """A name in the adapter's own file may be as long as the pattern needs to be slow."""
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for kind in "AB":
        tensors[f"base_model.model.{'a' * 1000}.lora_{kind}.weight"] = torch.zeros(8, 8)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    edit_json(tmp_path / "adapter_config.json", rank_pattern={"a*a*a*a*b": 4})
    start = time.process_time()
    refuse(folder, tmp_path, "no tensor to merge with aaa")
    assert time.process_time() - start < 10  # with that name it takes minutes


def test_weights_that_are_not_finite_are_refused(folder, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors[NAME + ".lora_A.weight"][0, 0] = math.nan
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    refuse(folder, tmp_path, "q_proj.weight: holds NaN")


def test_an_adapter_that_is_not_there_or_damaged_is_refused(folder, adapter, tmp_path):
    refuse(folder, tmp_path / "none", "lora .*none': there is no such folder, and it is not a hub id")
    refuse(folder, tmp_path, "adapter_config.json is missing")
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    refuse(folder, tmp_path, "adapter_model.safetensors: adapters are read from safetensors only")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    refuse(folder, tmp_path, "not readable JSON")
    shutil.copy(adapter / "adapter_config.json", tmp_path)
    refuse(folder, tmp_path, "adapter_model.safetensors is not a complete safetensors file")
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.safetensors").symlink_to(adapter / "adapter_model.safetensors")
    refuse(folder, tmp_path, "leads out of the folder")
    refuse(folder, 5, "lora must be None or a folder or hub id of an adapter, got 5")


def test_of_a_hub_id_two_files_are_fetched(folder, adapter, monkeypatch):
    """Whatever revision of the model was asked for."""
    seen = {}

    def fetch(name: str, **options) -> str:
        seen.update(options, name=name)
        return str(adapter)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    hub = {"revision": "v1", "token": "secret"}
    assert open_checkpoint(folder, lora="owner/name", **hub).changes
    assert seen.pop("ignore_patterns")
    files = ["adapter_config.json", "adapter_model.safetensors"]
    hub = {"cache_dir": None, "token": "secret"}
    assert seen == {"name": "owner/name", "allow_patterns": files, **hub}


def test_an_embedding_that_is_the_lm_head_too_is_not_merged(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    make_adapter(folder, tmp_path / "adapter", target_modules=["embed_tokens"])
    refuse(folder, tmp_path / "adapter", "embed_tokens.weight cannot be merged: embedding and LM head share")


def test_weights_that_are_quantised_or_made_up_are_refused(folder, adapter, tmp_path):
    refuse(folder, adapter, "cannot be merged with weights that are made up", load_format="dummy")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "fp8"})
    refuse(tmp_path, adapter, "weights that are quantised.* load those that it was trained on")
