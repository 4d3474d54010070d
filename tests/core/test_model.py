"""Qwen3 from a folder of safetensors against transformers: the same configuration, weights and logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.checkpoints.folder import FolderCheckpoint
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import reset_context, set_context
from nanovllm.utils.loader import load_model
from tiny_checkpoints import edit_json, load_reference, make_checkpoint, one_thread  # noqa: F401

PROMPTS = [[*range(100, 300)], [7], [*range(33)]]
CASES = {
    "as small as it gets": dict(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1),
    "tied embeddings": dict(tie_word_embeddings=True),
    "biases": dict(attention_bias=True),
    "heads wider than hidden_size / heads": dict(head_dim=24, num_attention_heads=6, num_key_value_heads=3),
    "seven query heads to one": dict(num_attention_heads=7, num_key_value_heads=1, head_dim=16),
    "another theta": dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rms_norm_eps=1e-5),
    "several files": dict(shard_size="50KB"),
}


def build(folder: Path) -> Qwen3ForCausalLM:
    checkpoint = FolderCheckpoint(str(folder))
    model = Qwen3ForCausalLM(checkpoint.hf_config())
    load_model(model, checkpoint)
    return model


def all_logits(model: Qwen3ForCausalLM, prompts: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """Of every position of every prompt, from one prefill of them all, in which nothing is stored."""
    lengths = [len(prompt) for prompt in prompts]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = dict(max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
    slots = torch.full((sum(lengths),), -1, dtype=torch.int32)
    set_context(True, cu_seqlens_q=starts, cu_seqlens_k=starts, **longest, slot_mapping=slots)
    try:
        with torch.inference_mode():
            tokens = torch.tensor([token for prompt in prompts for token in prompt])
            hidden = model(tokens, torch.cat([torch.arange(length) for length in lengths]))
            last, logits = model.compute_logits(hidden), model.lm_head.logits(hidden).split(lengths)
    finally:
        reset_context()
    torch.testing.assert_close(last, torch.stack([of_prompt[-1] for of_prompt in logits]))
    return logits


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path, case):
    folder = make_checkpoint(tmp_path, tokenizer=False, **CASES[case])
    reference = load_reference(folder)
    for prompt, logits in zip(PROMPTS, all_logits(build(folder), PROMPTS), strict=True):
        with torch.no_grad():
            expected = reference(input_ids=torch.tensor([prompt])).logits[0]
        assert expected.std() > 0.1, "logits so alike would show no difference"
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_fields_are_read_in_both_spellings_that_files_have(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    file, found = folder / "config.json", []
    for theta in (dict(rope_theta=5e5, rope_parameters=None), dict(rope_parameters={"rope_theta": 5e5})):
        for dtype in (dict(torch_dtype="float16", dtype=None), dict(dtype="float16", torch_dtype=None)):
            edit_json(file, rope_theta=None)
            edit_json(file, **theta, **dtype)
            found.append(FolderCheckpoint(str(folder)).hf_config())
    assert found == found[:1] * 4 and found[0].dtype == "float16"
    assert found[0].rope_parameters["rope_theta"] == 5e5


WRONG = [
    (dict(architectures=["GPT2LMHeadModel"]), "architectures must be .*Qwen3ForCausalLM"),
    (dict(hidden_size=0), "hidden_size must be an integer from 1"),
    (dict(num_attention_heads=3), "num_key_value_heads=2 must divide num_attention_heads=3"),
    (dict(use_sliding_window=True), "use_sliding_window = True is not supported"),
    (dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope_parameters must be of rope_type"),
]


@pytest.mark.parametrize("changes, message", WRONG)
def test_what_cannot_be_built_is_refused_by_name(tmp_path, changes, message):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        FolderCheckpoint(str(folder)).hf_config()


def test_a_tensor_without_a_place_and_a_parameter_without_a_tensor_are_errors_that_name_them(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    file, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({**tensors, "model.layers.1.extra": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match="model.layers.1.extra"):
        build(folder)
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, file)
    with pytest.raises(ValueError, match="layers.1.self_attn"):
        build(folder)
    save_file({**tensors, name: tensors[name][:-1].clone()}, file)
    with pytest.raises(ValueError, match=name):
        build(folder)


@pytest.mark.parametrize("place", ["config.json", "generation_config.json", "both", "tokenizer"])
def test_ends_of_sequences_are_found_wherever_files_name_them(tmp_path, place):
    folder = make_checkpoint(tmp_path)
    named = {"config.json": [5], "generation_config.json": [6, 7], "both": [5, 6, 7], "tokenizer": []}[place]
    if place in ("config.json", "both"):
        edit_json(folder / "config.json", eos_token_id=5)
    if place in ("generation_config.json", "both"):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    checkpoint = FolderCheckpoint(str(folder))
    ends = checkpoint.eos_token_ids(checkpoint.tokenizer())
    assert sorted(ends) == [*named, 256], "the tokenizer's own, too"
