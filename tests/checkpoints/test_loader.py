"""From a folder to parameters: each tensor in its place or an error that names it; no file is believed."""

import fnmatch
import json
import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from loaded_models import assert_same_parameters, build_model, expected_parameters
from open_checkpoints import open_checkpoint
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING

from nanovllm import LLM, SamplingParams, assembly
from nanovllm.assembly import get_model_class
from nanovllm.distributed.group import Group, use_group
from nanovllm.extensions.checkpoints.made_up import SHAPES, toy_tokenizer
from nanovllm.utils.loader import default_weight_loader, load_model
from tiny_checkpoints import ARCHITECTURES, EXACT, load_reference, make_checkpoint


def load(folder: Path) -> nn.Module:
    model = build_model(folder)
    load_model(model, open_checkpoint(folder))
    return model


def change_tensors(folder: Path, change) -> None:
    """Rewrite the checkpoint's only file after `change` has worked on its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_json(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied, shard_size", [(False, "60KB"), (True, "5GB")])
def test_parameters_are_what_transformers_loads(tmp_path, architecture, tied, shard_size):
    make_checkpoint(tmp_path, architecture, shard_size=shard_size, tie_word_embeddings=tied)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size != "5GB")
    model = load(tmp_path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert_same_parameters(model, expected_parameters(tmp_path))


def test_biases_are_loaded(tmp_path):
    make_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    assert_same_parameters(load(tmp_path), expected_parameters(tmp_path))


def test_weights_are_converted_to_the_dtype_of_the_parameters(tmp_path):
    make_checkpoint(tmp_path)
    expected = expected_parameters(tmp_path)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = load(tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_parameters(model, {name: value.bfloat16() for name, value in expected.items()})


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_hold_every_weight_and_only_their_part(tmp_path, size):
    make_checkpoint(tmp_path, "qwen3", num_key_value_heads=4)
    expected = expected_parameters(tmp_path)
    ranks = []
    for rank in range(size):
        with use_group(Group(rank, size)):
            ranks.append(load(tmp_path).state_dict())
    for name, whole in expected.items():
        parts = [rank[name] for rank in ranks]
        if name.endswith("norm.weight"):
            assert all(torch.equal(part, whole) for part in parts)
        elif "qkv_proj" in name or "gate_up_proj" in name:
            pieces = [part.chunk(2 if "gate" in name else 3) for part in parts]  # as many q as k and v heads
            joined = torch.cat([torch.cat(piece) for piece in zip(*pieces, strict=True)])
            assert torch.equal(joined, whole)
        else:
            assert torch.equal(
                torch.cat(parts, dim=1 if "o_proj" in name or "down_proj" in name else 0), whole
            )


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_hold_every_expert_and_only_their_part(tmp_path, size):
    make_checkpoint(tmp_path, "qwen3_moe", num_key_value_heads=4)
    ranks = []
    for rank in range(size):
        with use_group(Group(rank, size)):
            ranks.append(load(tmp_path).state_dict())
    whole = {name: value for name, value in expected_parameters(tmp_path).items() if ".mlp." in name}
    assert {name.split("mlp.")[1] for name in whole} == {
        "gate.weight", "experts.gate_up_proj.weight", "experts.down_proj.weight"
    }  # fmt: skip
    for name, value in whole.items():
        parts = [rank[name] for rank in ranks]
        if ".experts." in name:
            value, *parts = (each.unflatten(0, (8, -1)) for each in (value, *parts))
        if name.endswith("gate.weight"):
            assert all(torch.equal(part, value) for part in parts)
        elif "gate_up_proj" in name:
            gates, ups = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
            assert torch.equal(torch.cat([*gates, *ups], dim=1), value)
        else:
            assert torch.equal(torch.cat(parts, dim=2), value)


def test_slices_are_views_of_the_mapped_file(tmp_path):
    make_checkpoint(tmp_path)
    for tensor in open_checkpoint(tmp_path).tensors():
        if len(tensor.shape) == 2:
            whole = load_file(tensor.file)[tensor.name]
            assert tensor.shape == tuple(whole.shape)
            assert torch.equal(tensor[3:7], whole[3:7])
            assert torch.equal(tensor[:, 8:16], whole[:, 8:16])
            assert tensor[:, 8:16].stride() == (whole.shape[1], 1)


def test_a_default_device_does_not_swallow_the_weights(tmp_path):
    make_checkpoint(tmp_path)
    model = build_model(tmp_path)
    with torch.device("meta"):
        load_model(model, tmp_path)
    assert_same_parameters(model, expected_parameters(tmp_path))


def test_an_opened_checkpoint_can_be_loaded_and_opened_again_by_its_path(tmp_path):
    make_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model = build_model(tmp_path)
    load_model(model, checkpoint)
    assert_same_parameters(model, expected_parameters(open_checkpoint(checkpoint.path).path))


def test_old_rotary_frequencies_and_a_second_copy_of_tied_embeddings_are_skipped(tmp_path):
    make_checkpoint(tmp_path, tie_word_embeddings=True)

    def add_extras(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(tmp_path, add_extras)
    assert_same_parameters(load(tmp_path), expected_parameters(tmp_path))


@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_files_of_the_layers_alone_have_names_without_a_prefix(tmp_path, tied, shard_size):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=tied, shard_size=shard_size)
    expected = expected_parameters(folder)
    index = folder / "model.safetensors.index.json"
    for file in folder.glob("*.safetensors"):
        tensors = {name.removeprefix("model."): value for name, value in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        change_json(
            index, weight_map={name.removeprefix("model."): file for name, file in weight_map.items()}
        )
    assert_same_parameters(load(folder), expected)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_of_tied_weights_either_may_be_stored(tmp_path, model_impl):
    if model_impl == "transformers" and transformers.__version__ < "5":
        pytest.skip("models are built by transformers 5 or newer")
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    expected = load_reference(folder).state_dict()["lm_head.weight"].clone()

    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    change_tensors(folder, rename)
    checkpoint = open_checkpoint(folder, model_impl=model_impl)
    model = assembly.build_model(checkpoint.hf_config())
    load_model(model, checkpoint)
    found = dict(model.named_parameters(remove_duplicate=False))
    assert torch.equal(found["model.embed_tokens.weight"], expected)
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]


def test_tied_weights_that_differ_are_refused(tmp_path):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(320, 64)}))
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load(folder)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=4, hf_overrides={"tie_word_embeddings": False}) as llm:
        assert llm.generate([[1, 2]], SamplingParams(0, 2, True), use_tqdm=False)


def test_a_dtype_counts_only_where_a_tensor_is_wanted(tmp_path):
    folder = make_checkpoint(tmp_path)
    expected, mask = expected_parameters(folder), torch.ones(3, 3, dtype=torch.bool)
    change_tensors(
        folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": mask})
    )
    assert_same_parameters(load(folder), expected)
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": mask}))
    with pytest.raises(ValueError, match="tensor model.norm.weight: shape"):
        load(folder)
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64) > 0}))
    with pytest.raises(ValueError, match="tensor model.norm.weight: dtype BOOL, which is none of F16, BF16"):
        load(folder)


def test_a_second_copy_of_the_weights_by_other_names_is_not_read(tmp_path):
    folder = make_checkpoint(tmp_path)
    expected = expected_parameters(folder)
    save_file({"tok_embeddings.weight": torch.ones(3)}, folder / "consolidated.safetensors")
    model = build_model(folder)
    load_model(model, open_checkpoint(folder))
    assert_same_parameters(model, expected)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no safetensors file .only consolidated.safetensors"):
        open_checkpoint(folder).shards()


def add_stranger(tensors):
    tensors["model.layers.0.self_attn.stranger.weight"] = torch.ones(3)


def add_layer(tensors):
    tensors["model.layers.2.self_attn.k_proj.weight"] = tensors[
        "model.layers.1.self_attn.k_proj.weight"
    ].clone()


def remove_key(tensors):
    del tensors["model.layers.1.self_attn.k_proj.weight"]


def remove_norm(tensors):
    del tensors["model.norm.weight"]


def transpose_down(tensors):
    tensors["model.layers.0.mlp.down_proj.weight"] = tensors[
        "model.layers.0.mlp.down_proj.weight"
    ].T.contiguous()


def shorten_norm(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


def remove_expert(tensors):
    for part in ("gate", "up", "down"):
        del tensors[f"model.layers.1.mlp.experts.7.{part}_proj.weight"]


def add_expert(tensors):
    tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = torch.ones(32, 64)


def shorten_expert(tensors):
    tensors["model.layers.0.mlp.experts.2.up_proj.weight"] = torch.ones(31, 64)


def spoil_expert(tensors):
    tensors["model.layers.0.mlp.experts.5.down_proj.weight"][3, 3] = float("nan")


def make_integers(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int64)


@pytest.mark.parametrize(
    "change, message",
    [
        (add_stranger, r"model.safetensors: tensor model.layers.0.self_attn.stranger.weight has no place"),
        (add_layer, r"model.safetensors: tensor model.layers.2.self_attn.k_proj.weight has no place"),
        (remove_key, r"has no tensor model.layers.1.self_attn.k_proj.weight"),
        (remove_norm, r"has no tensor model.norm.weight"),
        (transpose_down, r"model.safetensors: tensor model.layers.0.mlp.down_proj.weight: shape \(96, 64\)"),
        (shorten_norm, r"model.safetensors: tensor model.norm.weight: shape \(63,\), expected \(64,\)"),
        (make_integers, r"model.safetensors: tensor model.norm.weight: dtype torch.int64, expected"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_fit_is_an_error_naming_file_and_tensor(tmp_path, change, message):
    make_checkpoint(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        (remove_expert, r"has no tensor model.layers.1.mlp.experts.7.gate_proj.weight, the first of 3 that"),
        (add_expert, r"model.safetensors: tensor model.layers.1.mlp.experts.8.up_proj.weight has no place"),
        (shorten_expert, r"model.safetensors: tensor .*0.mlp.experts.2.up_proj.weight: shape \(31, 64\)"),
        (spoil_expert, r"model.safetensors: tensor .*0.mlp.experts.5.down_proj.weight: holds NaN"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_fit_an_expert_is_an_error_naming_file_and_tensor(tmp_path, change, message):
    make_checkpoint(tmp_path, "qwen3_moe")
    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_tensor_in_two_files_is_an_error(tmp_path):
    make_checkpoint(tmp_path)
    norm = {"model.norm.weight": load_file(tmp_path / "model.safetensors")["model.norm.weight"]}
    save_file(norm, tmp_path / "second.safetensors")
    with pytest.raises(ValueError, match="second.safetensors: tensor model.norm.weight comes a second time"):
        load(tmp_path)


def test_a_part_of_a_name_is_no_match():
    class Model(nn.Module):
        packed_modules_mapping = {"q_proj": ("qkv_proj", "q")}

        def __init__(self):
            super().__init__()
            self.seq_proj = nn.Linear(2, 2, bias=False)
            self.seq_proj.weight.weight_loader = lambda param, _: param.fill_(1)

    class Checkpoint:
        path, fill, changes = "here", None, ()

        def tensors(self):
            yield SimpleNamespace(name="seq_proj.weight", file="here")

    model = Model()
    load_model(model, Checkpoint())
    assert torch.equal(model.seq_proj.weight, torch.ones(2, 2))


def test_the_default_weight_loader_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"shape \(1,\), expected \(4,\)"):
        default_weight_loader(nn.Parameter(torch.zeros(4)), torch.ones(1))


# Configuration, tokenizer and end-of-sequence ids


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_config_has_the_fields_and_defaults_of_transformers(tmp_path, architecture):
    sizes = "hidden_size intermediate_size vocab_size max_position_embeddings num_hidden_layers"
    needed = {name: 64 for name in sizes.split()} | {"num_attention_heads": 4, "num_key_value_heads": 4}
    name = ARCHITECTURES[architecture] + "ForCausalLM"
    raw = {"model_type": architecture, "architectures": [name], **needed}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = open_checkpoint(tmp_path, "dummy").hf_config()
    model_type = "gemma3_text" if architecture == "gemma3" else architecture
    expected = CONFIG_MAPPING[model_type].from_dict(raw)
    for name in [*needed, "rms_norm_eps", "tie_word_embeddings", "architectures"]:
        assert getattr(config, name) == getattr(expected, name), name
    assert config.head_dim == (getattr(expected, "head_dim", None) or 16)
    assert bool(config.attention_bias) == bool(getattr(expected, "attention_bias", False))
    numbers = "num_experts", "num_local_experts", "n_routed_experts"
    assert (config.experts is not None) == any(hasattr(expected, name) for name in numbers)
    if config.experts is not None:
        for name, value in vars(config.experts).items():
            assert getattr(expected, name, value) == value, name


def test_code_that_a_checkpoint_brings_is_never_run(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')\nraise SystemExit")
    code = {
        "AutoConfig": "evil.Config",
        "AutoModelForCausalLM": "evil.Model",
        "AutoTokenizer": ["evil.T", "evil.T"],
    }
    for name in ("config.json", "tokenizer_config.json"):
        change_json(tmp_path / name, auto_map=code, trust_remote_code=True)
    checkpoint = open_checkpoint(tmp_path)
    load_model(get_model_class(checkpoint.hf_config())(checkpoint.hf_config()), checkpoint)
    try:
        checkpoint.tokenizer()
    except ValueError as error:
        assert str(tmp_path) in str(error)
    assert not (tmp_path / "proof").exists()


def test_eos_ids_are_the_union_of_all_that_the_files_name(tmp_path):
    make_checkpoint(tmp_path)
    change_json(tmp_path / "config.json", eos_token_id=7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    checkpoint = open_checkpoint(tmp_path)
    tokenizer = checkpoint.tokenizer()
    assert set(checkpoint.eos_token_ids(tokenizer)) == {7, 9, tokenizer.eos_token_id}
    assert set(checkpoint.eos_token_ids(None)) == {7, 9}


def test_no_eos_id_is_made_up(tmp_path):
    make_checkpoint(tmp_path, "llama")
    for name in ("config.json", "generation_config.json"):
        change_json(tmp_path / name, eos_token_id=None)
    assert open_checkpoint(tmp_path).eos_token_ids(None) == ()


def test_a_folder_without_tokenizer_has_none_unless_its_weights_are_made_up(tmp_path):
    make_checkpoint(tmp_path, tokenizer=False)
    assert open_checkpoint(tmp_path).tokenizer() is None
    assert open_checkpoint(tmp_path, "dummy").tokenizer().encode("hi") == [104, 105]


def test_a_folders_tokenizer_is_read(tmp_path):
    make_checkpoint(tmp_path)
    tokenizer = open_checkpoint(tmp_path).tokenizer()
    assert tokenizer.decode(tokenizer.encode("Grüße 🙂")) == "Grüße 🙂"
    assert tokenizer.eos_token == "<|end|>"


def test_text_is_what_the_tokens_say_whatever_the_tokenizer_would_clean_up(tmp_path):
    make_checkpoint(tmp_path, num_hidden_layers=1)
    clean_up = "clean_up_tokenization_spaces"
    settings = {clean_up: True, f"{clean_up}_for_bpe_even_though_it_will_corrupt_output": True}
    change_json(tmp_path / "tokenizer_config.json", **settings)
    with LLM(str(tmp_path), **EXACT, num_kvcache_blocks=16) as llm:
        text = "Hello , world . Is n't it ?"
        assert llm.decode(llm.encode(text)) == text
        params = SamplingParams(max_tokens=40, seed=0, allowed_token_ids=llm.encode(" ,."))
        (result,) = llm.generate([[1]], params, use_tqdm=False)
        assert result["text"] == "".join(llm.stream([1], params))
        assert len(result["text"]) == len(result["token_ids"]) == 40


# Random weights


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_has_its_published_number_of_parameters(name):
    config = open_checkpoint(name, "dummy").hf_config()
    with torch.device("meta"):
        model = get_model_class(config)(config)
    billions = sum(param.numel() for param in model.parameters()) / 1e9
    assert billions == pytest.approx(
        {"0.6b": 0.596, "4b": 4.022, "8b": 8.191, "32b": 32.762, "30b-a3b": 30.532, "gpt-oss-20b": 20.915}[
            name.removeprefix("qwen3-")
        ],
        abs=1e-3,
    )


def test_random_weights_need_no_file_and_are_the_same_each_time(tmp_path):
    make_checkpoint(tmp_path, "qwen2", tokenizer=False)
    first, second = build_model(tmp_path), build_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    load_model(first, open_checkpoint(tmp_path, "dummy"))
    load_model(second, open_checkpoint(tmp_path, "dummy"))
    assert_same_parameters(first, second.state_dict())
    assert torch.equal(first.model.norm.weight, torch.ones(64))
    assert not first.model.layers[0].self_attn.qkv_proj.bias.any()
    weight = first.model.layers[0].mlp.down_proj.weight
    assert weight.std() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(weight, first.model.layers[1].mlp.down_proj.weight)


def test_random_weights_of_experts_differ(tmp_path):
    make_checkpoint(tmp_path, "qwen3_moe")
    model = build_model(tmp_path)
    load_model(model, open_checkpoint(tmp_path, "dummy"))
    stacks = [layer.mlp.experts.gate_up_proj.weight for layer in model.model.layers]
    matrices = [matrix for stack in stacks for matrix in stack.chunk(8)]
    assert all(matrix.std().item() == pytest.approx(0.02, rel=0.1) for matrix in matrices)
    assert len({matrix.sum().item() for matrix in matrices}) == 16


def test_the_toy_tokenizer_maps_bytes_to_themselves():
    tokenizer = toy_tokenizer()
    text = "Grüße 🙂\x00\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.decode([104, 105, 9999, 151935]) == "hi"
    assert tokenizer.decode([104, tokenizer.eos_token_id], skip_special_tokens=True) == "h"
    messages = [{"role": "user", "content": "hi"}]
    assert "hi" in tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# Names that lead nowhere


@pytest.fixture
def no_hub(monkeypatch):
    """Every use of the hub fails the test."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))


@pytest.mark.parametrize(
    "name",
    ["", "missing", "/missing/folder", "./missing", "../missing", "~/missing", "a/b/c", "a/b.gguf", "a\0b/c"],
)
def test_what_looks_like_a_path_is_not_asked_of_the_hub(no_hub, name):
    with pytest.raises(ValueError) as error:
        open_checkpoint(name)
    assert repr(name) in str(error.value)


def test_a_shape_without_dummy_weights_is_refused(no_hub):
    with pytest.raises(ValueError, match="load_format='dummy'"):
        open_checkpoint("qwen3-0.6b")


REPOSITORY = """
    config.json tokenizer.json chat_template.jinja README.md pytorch_model.bin original/params.json
    consolidated.safetensors consolidated-00001.safetensors model.safetensors.index.json
    model-1.safetensors model-2.safetensors x.safetensors
""".split()


@pytest.fixture
def fetch(tmp_path, monkeypatch):
    """Files that are asked of a repository with REPOSITORY's, whose index lists some."""
    import huggingface_hub

    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "x*"}

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str], **options) -> str:
        assert name == "owner/name"
        for file in REPOSITORY:
            is_allowed, is_ignored = (
                any(fnmatch.fnmatch(file, each) for each in patterns)
                for patterns in (allow_patterns, ignore_patterns)
            )
            if is_allowed and not is_ignored and file != without:
                is_index = file == "model.safetensors.index.json"
                (tmp_path / file).write_text(json.dumps({"weight_map": weight_map} if is_index else {}))
        return str(tmp_path)

    without = ""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    def fetch(load_format: str, missing: str = "") -> set[str]:
        nonlocal without
        without = missing
        assert open_checkpoint("owner/name", load_format).path == str(tmp_path)
        return {file.name for file in tmp_path.iterdir()}

    return fetch


SETTINGS = {"config.json", "tokenizer.json", "chat_template.jinja"}


def test_of_a_hub_id_come_the_files_that_its_index_lists(fetch):
    settings = SETTINGS | {"model.safetensors.index.json"}
    assert fetch("dummy") == settings
    assert fetch("auto") == settings | {"model-1.safetensors", "model-2.safetensors"}


def test_of_a_hub_id_without_an_index_come_all_weights_but_a_second_copy(fetch):
    weights = {"model-1.safetensors", "model-2.safetensors", "x.safetensors"}
    assert fetch("auto", missing="model.safetensors.index.json") == SETTINGS | weights


def test_of_a_hub_id_without_safetensors_and_gguf_files_come_those_of_torch_save(fetch, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: REPOSITORY)
    monkeypatch.setitem(globals(), "REPOSITORY", [name for name in REPOSITORY if "safetensors" not in name])
    assert fetch("auto") == SETTINGS | {"pytorch_model.bin"}


def test_a_hub_that_does_not_answer_is_named_with_the_id(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="'owner/name': there is no such folder, and the hub"):
        open_checkpoint("owner/name")


def test_a_folder_is_no_gguf_file(tmp_path):
    make_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="is a folder"):
        open_checkpoint(tmp_path, "gguf")
    with pytest.raises(ValueError, match="neither a folder"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_other_files_of_weights_are_not_read(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.pt").write_bytes(b"never opened")
    message = "no safetensors file .only model.pt.; only safetensors, GGUF and pytorch_model.*bin are read"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


# Hostile folders


@pytest.fixture
def sharded(tmp_path) -> Path:
    return make_checkpoint(tmp_path / "model", shard_size="60KB")


def change_index(folder: Path, tensor: str, file: object) -> None:
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    change_json(index, weight_map={**weight_map, tensor: file})


@pytest.mark.parametrize("file", ["../outside.safetensors", "{outside}", "sub/../../outside.safetensors"])
def test_an_index_cannot_lead_out_of_the_folder(sharded, file):
    outside = sharded.parent / "outside.safetensors"
    save_file({"model.norm.weight": torch.ones(64)}, outside)
    change_index(sharded, "model.norm.weight", file.format(outside=outside))
    with pytest.raises(ValueError, match="leads out of the folder"):
        load(sharded)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"]
)
def test_a_link_cannot_lead_out_of_the_folder(tmp_path, name):
    folder = make_checkpoint(tmp_path / "model")
    shutil.move(folder / name, tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=f"'{name}' leads out of the folder"):
        open_checkpoint(folder)


def test_the_hubs_cache_may_link_to_its_blobs(tmp_path):
    folder = make_checkpoint(tmp_path / "models--a--b" / "snapshots" / "0123")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for file in list(folder.iterdir()):
        shutil.move(file, blobs / file.name)
        file.symlink_to(Path("..", "..", "blobs", file.name))
    assert_same_parameters(load(folder), expected_parameters(folder))


def test_a_link_to_itself_is_an_error(tmp_path):
    folder = make_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors"):
        open_checkpoint(folder)


def test_a_pipe_is_not_waited_for(tmp_path):
    folder = make_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(ValueError, match="not a regular file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("file", [7, None, ["a"], "a\0b", "x" * 5000, "missing.safetensors"])
def test_a_shard_that_is_no_file_is_an_error(sharded, file):
    change_index(sharded, "model.norm.weight", file)
    with pytest.raises(ValueError, match=str(sharded)):
        load(sharded)


def test_a_tensor_that_only_the_index_has_is_an_error_naming_both(sharded):
    change_index(sharded, "model.stranger.weight", "model-00001-of-00005.safetensors")
    present = sorted(file.name for file in sharded.glob("*.safetensors"))[0]
    change_index(sharded, "model.stranger.weight", present)
    with pytest.raises(ValueError, match=f"{present} is not a complete .* model.stranger.weight"):
        load(sharded)


def test_tensors_that_the_index_does_not_list_are_left_alone(sharded):
    """Neither those of a file that it names nor those of other files, which many folders have beside."""
    expected = expected_parameters(sharded)
    first, *_, last = sorted(sharded.glob("*.safetensors"))
    strangers = {"model.stranger.weight": torch.ones(3), "model.norm.weight": torch.zeros(64)}
    save_file(strangers, sharded / "beside.safetensors")
    for shard in (first, last):
        save_file(strangers | load_file(shard), shard)
    assert_same_parameters(load(sharded), expected)


def truncate(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def empty(raw: bytes) -> bytes:
    return b""


def announce_more_header_than_file(raw: bytes) -> bytes:
    return struct.pack("<Q", 2**62) + raw[8:]


def overlap(raw: bytes) -> bytes:
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    first, second, *_ = [name for name in header if name != "__metadata__"]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


@pytest.mark.parametrize("damage", [truncate, empty, announce_more_header_than_file, overlap])
def test_a_damaged_file_is_an_error_naming_it(tmp_path, damage):
    file = make_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match="model.safetensors is not a complete safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"a": ' * 100_000,
        "\ufffe",
        '{"model_type": "qwen3", "x": ' + "1" * 10_000 + "}",
    ],
)
def test_a_damaged_config_is_an_error_naming_it(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        open_checkpoint(tmp_path).hf_config()


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen3ForSequenceClassification"]},
        {"architectures": ["UnheardOfForCausalLM"], "model_type": "unheard_of"},
        {"architectures": None, "model_type": None},
        {"architectures": [["Qwen3ForCausalLM"]]},
        {"architectures": 7},
        {"hidden_act": "gelu"},
        {"quantization_config": 7},
        {"use_sliding_window": "yes"},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": 7},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0**20}},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e300}},
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": -1},
        {"hidden_size": "64"},
        {"hidden_size": 64.0},
        {"vocab_size": True},
        {"num_attention_heads": 0},
        {"rope_parameters": None, "rope_scaling": "linear"},
    ],
    ids=str,
)
def test_an_impossible_config_is_an_error_naming_it(tmp_path, changes):
    make_checkpoint(tmp_path)
    change_json(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match="config.json"):
        open_checkpoint(tmp_path).hf_config()


def test_a_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("value", ["7", -1, [1, "2"], {"a": 1}, 1.5, True])
def test_an_eos_id_that_is_none_is_an_error(tmp_path, value):
    make_checkpoint(tmp_path, tokenizer=False)
    change_json(tmp_path / "config.json", eos_token_id=value)
    with pytest.raises(ValueError, match="eos_token_id"):
        open_checkpoint(tmp_path).eos_token_ids(None)


def test_a_damaged_tokenizer_is_an_error_naming_the_folder(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=str(tmp_path)):
        open_checkpoint(tmp_path).tokenizer()
