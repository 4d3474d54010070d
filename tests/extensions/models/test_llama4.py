"""Llama 4 through the whole engine, against transformers: both kinds of layers, and of networks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from cases import slow
from forked_ranks import forked_ranks  # noqa: F401
from open_checkpoints import open_checkpoint
from quantised_checkpoints import compressed, quantise
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.assembly import build_model
from nanovllm.extensions.models.llama4 import Llama4ForCausalLM
from nanovllm.extensions.quantised.kernels.quantised_weight import dequantise
from nanovllm.utils.loader import load_model, pack_weights
from nanovllm.utils.torch_defaults import torch_defaults
from tiny_checkpoints import EXACT, assert_greedy, edit_json, load_reference, one_thread  # noqa: F401

CHUNK = 24
SIZES = dict(vocab_size=320, hidden_size=64, intermediate_size=48, intermediate_size_mlp=80)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512)
SIZES |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
# Published configurations in this size. Chunks and steps of temperatures are small: prompts pass them.
SMALL = SIZES | dict(attention_chunk_size=CHUNK, floor_scale=16, attn_scale=0.3)
LLAMA3 = dict(rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0)
LLAMA3 |= dict(original_max_position_embeddings=64)
SCOUT = SMALL | dict(num_hidden_layers=4, num_local_experts=4, rope_scaling=LLAMA3)
MAVERICK = SMALL | dict(num_hidden_layers=4, num_local_experts=8, interleave_moe_layer_step=2)
MAVERICK |= dict(use_qk_norm=False, rope_scaling=None)
MODELS = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": SCOUT,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": MAVERICK,
    # Written by transformers, which says of each layer what it is.
    "a text model made of Scout": SCOUT
    | dict(moe_layers=[0, 1, 2, 3], no_rope_layers=[1, 1, 1, 0])
    | dict(layer_types=["chunked_attention"] * 3 + ["full_attention"]),
    "other layers": MAVERICK
    | dict(num_hidden_layers=3, moe_layers=[0, 2], no_rope_layers=[0, 1, 0], num_experts_per_tok=3)
    | dict(use_qk_norm=True, attention_bias=True, attn_temperature_tuning=False),
    "no chunks": SCOUT
    | dict(attention_chunk_size=None, no_rope_layer_interval=2, layer_types=["full_attention"] * 4),
    "no layer without positions": SCOUT | dict(no_rope_layers=[1] * 4, interleave_moe_layer_step=4),
}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
# Some end around the edge of a chunk, and of those that are computed in parts.
PROMPTS = [[1, 2, 3], [*range(23)], [*range(24)], [*range(25)], [7] * 40, [*range(100, 230)], [*range(60)]]


def make_llama4(folder: Path, name: str = "meta-llama/Llama-4-Scout-17B-16E-Instruct", **changes) -> Path:
    torch.manual_seed(5)
    config = transformers.Llama4TextConfig(**MODELS[name] | changes)
    model = transformers.Llama4ForCausalLM(config)
    with torch.no_grad():
        for kind, param in model.named_parameters():
            param.uniform_(0.5, 1.5) if "norm" in kind else param.normal_(0, 0.15)
    model.save_pretrained(folder)
    # As published: transformers would write of each layer what follows from the steps.
    lists = {"moe_layers", "no_rope_layers", "layer_types"} - MODELS[name].keys()
    fields = json.loads((folder / "config.json").read_text())
    fields = {field: value for field, value in fields.items() if field not in lists}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def assert_answers(folder: Path, reference: Path, **options) -> None:
    theirs = load_reference(reference)
    options = dict(max_num_batched_tokens=40, num_kvcache_blocks=40) | options
    with LLM(str(folder), **EXACT, **options) as llm:
        assert type(llm.model_runner.model) is Llama4ForCausalLM
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
            assert_greedy(theirs, prompt, result["token_ids"])


@pytest.mark.parametrize("name", MODELS)
def test_it_answers_as_transformers_does(tmp_path, name):
    """Blocks run out, so that sequences are preempted; prompts are computed in parts and share beginnings."""
    assert_answers(folder := make_llama4(tmp_path, name), folder)


@pytest.mark.parametrize("name", [slow("meta-llama/Llama-4-Scout-17B-16E-Instruct"), "other layers"])
def test_ranks_have_parts_of_heads_and_of_every_network(tmp_path, name):
    assert_answers(folder := make_llama4(tmp_path, name), folder, tensor_parallel_size=2)


@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path):
    folder, prompt = make_llama4(tmp_path), PROMPTS[5]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=20) as llm:
        (result,) = llm.generate([prompt], params, use_tqdm=False)
    expected = load_reference(folder)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert expected.std() > 0.1, "logits so alike would show no difference"
    for entries, row in zip(result["prompt_logprobs"][1:], expected, strict=False):
        assert len(entries) >= 20
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-4)


def test_a_context_within_a_chunk_needs_no_rule(tmp_path):
    """And one within the first step of temperatures none of these."""
    folder = make_llama4(tmp_path)
    theirs = load_reference(folder)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=20, max_model_len=CHUNK) as llm:
        hooks = {
            layer.self_attn.attn.variant.hooks.first_token for layer in llm.model_runner.model.model.layers
        }
        assert hooks == {None}
        (result,) = llm.generate([[1, 2, 3]], replace(GREEDY, max_tokens=20), use_tqdm=False)
    assert_greedy(theirs, [1, 2, 3], result["token_ids"])


def test_blocks_of_chunks_that_are_left_behind_go_back(tmp_path):
    """Where all layers have chunks."""
    folder = make_llama4(tmp_path, "no layer without positions")
    theirs = load_reference(folder)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=12, max_num_batched_tokens=16) as llm:
        assert llm.config.hf_config.tokens_in_reach == CHUNK
        manager = llm.scheduler.block_manager
        with mock.patch.object(manager, "release", wraps=manager.release) as release:
            results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert release.call_count > 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_greedy(theirs, prompt, result["token_ids"])


# What is stored in another way


def store_apart(folder: Path, target: Path, prefix: str = "") -> Path:
    """A copy in which each expert has matrices of its own, as llm-compressor writes it."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".experts." not in name:
            tensors[prefix + name] = tensor
            continue
        parent, _, kind = name.rpartition(".")
        parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
        for number, matrix in enumerate(tensor.mT):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                tensors[f"{prefix}{parent}.{number}.{part}.weight"] = rows.contiguous()
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


def store_together(folder: Path) -> None:
    """Its inverse, in place."""
    tensors, matrices = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        parent, experts, rest = name.rpartition(".experts.")
        if experts:
            number, part, _ = rest.split(".")
            matrices.setdefault(parent, {})[part, int(number)] = tensor.mT
        else:
            tensors[name] = tensor
    for parent, found in matrices.items():
        gates, ups, downs = (
            torch.stack([found[part, i] for i in range(len(found) // 3)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{parent}.experts.gate_up_proj"] = torch.cat((gates, ups), dim=-1)
        tensors[f"{parent}.experts.down_proj"] = downs.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"


@pytest.mark.parametrize("kept", [slow(ATTENTION, id="but attention"), pytest.param((), id="all in fp8")])
@pytest.mark.parametrize("size", [1, 2])
def test_a_quantised_checkpoint_has_experts_apart(tmp_path, kept, size):
    """As published by RedHatAI, whose attention is not quantised; rows of fp8 are put in order as well."""
    apart = store_apart(make_llama4(tmp_path / "floats"), tmp_path / "apart")
    packer = compressed("float-quantized", 8, "channel", torch.float32)
    if kept:
        packer = replace(
            packer, config=packer.config | {"ignore": ["lm_head", "re:.*self_attn", "re:.*router"]}
        )
    packed = quantise(apart, tmp_path / "packed", packer, tmp_path / "reference", kept)
    store_together(tmp_path / "reference")
    assert_answers(packed, tmp_path / "reference", tensor_parallel_size=size)


def test_its_experts_can_be_quantised_when_they_are_loaded(tmp_path):
    folder = make_llama4(tmp_path)
    checkpoint = open_checkpoint(folder)
    with torch_defaults(torch.float32, torch.device("cpu")):
        model = build_model(checkpoint.hf_config(), quantization="fp8")
        load_model(model, checkpoint)
    pack_weights(model)
    stored = load_file(folder / "model.safetensors")["model.layers.1.feed_forward.experts.gate_up_proj"]
    found = dequantise(model.model.layers[1].mlp.experts.gate_up_proj.matrix.quantised, torch.float32)
    torch.testing.assert_close(found, stored.mT.flatten(0, 1), atol=0.02, rtol=0.07)


def test_an_adapter_is_for_rows_in_the_order_of_the_file(tmp_path):
    folder, merged, lora = make_llama4(tmp_path / "base"), tmp_path / "merged", tmp_path / "lora"
    name, a, b = "model.layers.0.self_attn.q_proj", torch.randn(4, 64), torch.randn(64, 4) * 0.1
    lora.mkdir()
    factors = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(factors, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    shutil.copytree(folder, merged)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.weight"] += b @ a
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    assert_answers(folder, merged, lora=str(lora))


def make_whole(text: Path, folder: Path) -> Path:
    """What also reads images, with tensors named as they are published."""
    fields = json.loads((text / "config.json").read_text())
    tensors = {f"language_model.{k}": v for k, v in load_file(text / "model.safetensors").items()}
    for name in "vision_model.patch_embedding.linear", "multi_modal_projector.linear_1":
        tensors[f"{name}.weight"] = torch.full((2, 2), torch.nan)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    whole = dict(architectures=["Llama4ForConditionalGeneration"], model_type="llama4")
    whole |= dict(text_config=fields, vision_config={"model_type": "llama4_vision_model"})
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def test_of_a_checkpoint_that_reads_images_the_text_part_is_read(tmp_path):
    text = make_llama4(tmp_path / "text")
    folder = make_whole(text, tmp_path / "whole")
    with pytest.warns(UserWarning, match="of a Llama4ForConditionalGeneration the text part is read"):
        assert_answers(folder, text)


def test_of_a_quantised_one_names_of_layers_are_those_of_the_text_part(tmp_path):
    apart = store_apart(make_llama4(tmp_path / "floats"), tmp_path / "apart")
    ignored = [f"language_model.model.layers.{i}.self_attn.{name}" for i in range(4) for name in ATTENTION]
    ignored += ["language_model.lm_head", "vision_model.patch_embedding.linear"]
    packer = compressed("float-quantized", 8, "channel", torch.float32)
    packer = replace(packer, config=packer.config | {"ignore": ignored})
    packed = quantise(apart, tmp_path / "packed", packer, tmp_path / "reference", ATTENTION)
    store_together(tmp_path / "reference")
    with pytest.warns(UserWarning, match="the text part is read"):
        assert_answers(make_whole(packed, tmp_path / "whole"), tmp_path / "reference")


# What is refused


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"no_rope_layers": [1, 2, 1, 0]}, "no_rope_layers must have 0 or 1 for each layer"),
        ({"no_rope_layers": [1, 1, 0]}, "no_rope_layers must have 0 or 1 for each layer"),
        ({"no_rope_layers": 1}, "no_rope_layers must have 0 or 1 for each layer"),
        (
            {"layer_types": ["full_attention"] * 4},
            "layer_types must be 'chunked_attention' where layers rotate",
        ),
        ({"layer_types": "full_attention"}, "layer_types must be 'chunked_attention' where layers rotate"),
        ({"moe_layers": 3}, "moe_layers must be a list"),
        ({"attention_chunk_size": 0}, "attention_chunk_size"),
        ({"attention_chunk_size": "8192"}, "attention_chunk_size"),
        ({"intermediate_size_mlp": -1}, "intermediate_size_mlp"),
        ({"interleave_moe_layer_step": 0, "moe_layers": None}, "interleave_moe_layer_step"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ({"floor_scale": 0}, "floor_scale"),
        ({"attn_scale": "0.1"}, "attn_scale"),
        ({"use_qk_norm": 1}, "use_qk_norm"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, "change no length"),
        (
            {"rope_parameters": LLAMA3 | dict(original_max_position_embeddings=6.2831854820251465)},
            "finite angles, got 'llama3'",
        ),
    ],
)
def test_a_setting_that_is_not_possible_is_refused_by_name(tmp_path, changes, message):
    folder = make_llama4(tmp_path)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **EXACT)


def test_a_tensor_of_fewer_experts_is_refused(tmp_path):
    folder = make_llama4(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.feed_forward.experts.down_proj"
    tensors[name] = tensors[name][:3].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="holds 3 experts, not 4"):
        LLM(str(folder), **EXACT)


def test_other_formats_of_experts_in_one_tensor_are_refused(tmp_path):
    """As Meta's own in fp8."""
    folder = make_llama4(tmp_path)
    edit_json(folder / "config.json", quantization_config={"quant_method": "fbgemm_fp8"})
    with pytest.raises(ValueError, match="fbgemm_fp8"):
        LLM(str(folder), **EXACT)


def test_it_cannot_be_exact(tmp_path):
    with pytest.raises(ValueError, match="exact=True needs the architecture"):
        LLM(str(make_llama4(tmp_path)), **EXACT, exact=True)
