"""EXAONE 3.5: a Llama with other names, which answers as the Llama that it was made of."""

import json
from pathlib import Path

import pytest
import torch
from forked_ranks import forked_ranks  # noqa: F401
from gguf_files import write_gguf
from open_checkpoints import open_checkpoint
from quantised_checkpoints import PACKERS, quantise
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.models.exaone import ExaoneForCausalLM
from tiny_checkpoints import EXACT, assert_greedy, load_reference, make_checkpoint, one_thread  # noqa: F401

TENSORS = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    "self_attn.o_proj.": "attn.attention.out_proj.",
    "self_attn.": "attn.attention.",
    "input_layernorm.": "ln_1.",
    "post_attention_layernorm.": "ln_2.",
    "mlp.gate_proj.": "mlp.c_fc_0.",
    "mlp.up_proj.": "mlp.c_fc_1.",
    "mlp.down_proj.": "mlp.c_proj.",
}
FIELDS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64)
PUBLISHED = dict(architectures=["ExaoneForCausalLM"], model_type="exaone", rope_scaling=LLAMA3)
PUBLISHED |= dict(auto_map={"AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"})
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], [*range(60)], [7] * 17, [*range(59), 5]]


def make_llama(folder: Path, is_tied: bool) -> Path:
    sizes = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=20, rms_norm_eps=1e-5)
    return make_checkpoint(
        folder, "llama", tokenizer=False, tie_word_embeddings=is_tied, rope_scaling=dict(LLAMA3), **sizes
    )


def make_exaone(llama: Path, folder: Path) -> Path:
    """The same as it would be published."""
    folder.mkdir()
    tensors = {}
    for name, tensor in load_file(llama / "model.safetensors").items():
        for ours, theirs in TENSORS.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((llama / "config.json").read_text())
    theta = fields.pop("rope_parameters", fields)["rope_theta"]
    fields = {name: fields[name] for name in fields if name not in FIELDS.values()} | {
        name: fields[other] for name, other in FIELDS.items()
    }
    (folder / "config.json").write_text(json.dumps(fields | PUBLISHED | {"rope_theta": theta}))
    return folder


def assert_answers(folder: Path, reference: Path, **options) -> None:
    theirs = load_reference(reference)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=40, max_num_batched_tokens=24, **options) as llm:
        assert type(llm.model_runner.model) is ExaoneForCausalLM
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
            assert_greedy(theirs, prompt, result["token_ids"])


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_it_answers_as_the_llama_of_these_weights(tmp_path, is_tied):
    llama = make_llama(tmp_path / "llama", is_tied)
    folder = make_exaone(llama, tmp_path / "exaone")
    assert {*load_file(folder / "model.safetensors")}.isdisjoint(
        name for name in load_file(llama / "model.safetensors") if "lm_head" not in name
    )
    assert_answers(folder, llama)


def test_ranks_have_parts_of_it(tmp_path):
    llama = make_llama(tmp_path / "llama", is_tied=True)
    assert_answers(make_exaone(llama, tmp_path / "exaone"), llama, tensor_parallel_size=2)


def test_its_weights_may_be_quantised(tmp_path):
    llama, reference = make_llama(tmp_path / "llama", is_tied=True), tmp_path / "reference"
    packed = quantise(llama, tmp_path / "packed", PACKERS["awq"], reference)
    assert_answers(make_exaone(packed, tmp_path / "exaone"), reference)


def test_an_adapter_has_names_of_the_file(tmp_path):
    folder, lora = make_exaone(make_llama(tmp_path / "llama", False), tmp_path / "exaone"), tmp_path / "lora"
    name, a, b = "transformer.h.1.attn.attention.out_proj", torch.randn(4, 160), torch.randn(64, 4)
    lora.mkdir()
    factors = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(factors, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    tensors = load_file(tmp_path / "llama/model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] += b @ a
    save_file(tensors, tmp_path / "llama/model.safetensors", {"format": "pt"})
    assert_answers(folder, tmp_path / "llama", lora=str(lora))


def test_it_is_read_from_a_gguf_file(tmp_path):
    """There rows are in the order that they have here, unlike Llama's, and the scaling comes as factors."""
    llama = make_llama(tmp_path / "llama", is_tied=True)
    scaled = load_reference(llama).model.rotary_emb.inv_freq
    factors = 1.0 / 10000.0 ** (torch.arange(0, 20, 2) / 20) / scaled
    assert factors.max() == pytest.approx(8)
    folder = make_exaone(llama, tmp_path / "exaone")
    assert_answers(write_gguf(folder, extra_tensors=[("rope_freqs.weight", factors)]), llama)


def test_fields_may_have_the_names_that_transformers_writes(tmp_path):
    """Which knows EXAONE's own in newer versions, and writes those of Llama. Nothing else differs."""
    llama = make_llama(tmp_path / "llama", is_tied=True)
    folder = make_exaone(llama, tmp_path / "exaone")
    config = open_checkpoint(folder).hf_config()
    fields = json.loads((folder / "config.json").read_text())
    fields = {FIELDS.get(name, name): value for name, value in fields.items()}
    (folder / "config.json").write_text(json.dumps(fields))
    newer = open_checkpoint(folder).hf_config()
    sizes = "num_hidden_layers rms_norm_eps rope_parameters context_limit architectures".split()
    for name in sizes:
        assert getattr(config, name) == getattr(newer, name), name
    assert newer.num_hidden_layers == 2 and newer.rms_norm_eps == 1e-5


def test_another_activation_is_refused(tmp_path):
    folder = make_exaone(make_llama(tmp_path / "llama", is_tied=True), tmp_path / "exaone")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"activation_function": "gelu"}))
    with pytest.raises(ValueError, match="hidden_act = 'gelu' is not supported, only silu"):
        LLM(str(folder), **EXACT)
