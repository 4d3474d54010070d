"""GGUF files: the same model comes out as the one that went in, and nothing hostile gets far."""

import inspect
import pickle
import struct
import time
import warnings
from pathlib import Path

import gguf
import pytest
import regex
import torch
import transformers
from cases import slow
from forked_ranks import forked_ranks  # noqa: F401
from gguf_files import byte_level_metadata, metadata_of, placed, write_gguf
from gguf_packer import decode, encode
from gpu_checks import assert_answers_as
from kernel_checks import needs_cuda
from open_checkpoints import open_checkpoint
from safetensors.torch import load_file, save_file
from smollm2 import smollm2_gguf  # noqa: F401  a fixture
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

import tiny_checkpoints
from nanovllm import LLM, SamplingParams
from nanovllm.assembly import build_model, get_model_class
from nanovllm.config import Config
from nanovllm.extensions.checkpoints.gguf_file import GGUFTensor
from nanovllm.extensions.checkpoints.gguf_tokenizer import CUTS, SPLITS, tokenizer_from_gguf
from nanovllm.extensions.checkpoints.names import MadeTensor, with_names_of
from nanovllm.extensions.models.config import DecoderConfig
from nanovllm.extensions.quantised import gguf as quantised_gguf
from nanovllm.extensions.quantised.gguf import PackedCodes
from nanovllm.extensions.quantised.gguf_blocks import decode_values
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight
from nanovllm.layers.linear import Shard
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.utils.loader import load_model
from nanovllm.utils.torch_defaults import torch_defaults
from tiny_checkpoints import assert_greedy, load_reference

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3", "qwen3_moe", "qwen2_moe"]
LLAMA_3 = inspect.signature(TikTokenConverter).parameters["pattern"].default
QUANTISATIONS = ["F32", "F16", "BF16", "Q8_0", "Q4_0"]


def make_checkpoint(folder: Path, architecture: str = "qwen3", *args, **settings) -> Path:
    """One that fits into the format, which does not say by what Gemma divides scores."""
    if architecture == "gemma3":
        settings = {"query_pre_attn_scalar": settings.get("head_dim", 16)} | settings
    return tiny_checkpoints.make_checkpoint(folder, architecture, *args, **settings)


def redraw(folder: Path, seed: int) -> None:
    """Other weights, the same with every version of transformers, which differ in the order of experts."""
    generator, file = torch.Generator().manual_seed(seed), folder / "model.safetensors"
    tensors = load_file(file)
    for name in sorted(tensors):
        if "norm" in name:
            tensors[name].uniform_(0.5, 1.5, generator=generator)
        else:
            tensors[name].normal_(0, 0.15, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})


def requantised(tensor: torch.Tensor, quantisation: str) -> torch.Tensor:
    """What is left of a matrix after a trip through a quantisation."""
    kind = quantisation if tensor.dim() == 2 else "F32"
    return decode(encode(tensor, kind), kind)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_all_tensors_come_back(tmp_path, architecture, quantisation, tied):
    make_checkpoint(tmp_path, architecture, tie_word_embeddings=tied, vocab_size=96)
    expected = load_file(tmp_path / "model.safetensors")
    tensors = {t.name: t for t in placed(open_checkpoint(write_gguf(tmp_path, quantisation)))}
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].shape == tuple(value.shape)
        if architecture == "gemma3" and "norm" in name:
            value = value + 1 - 1  # which is in the file and loses some bits
        kind = "F32" if name.endswith("gate.weight") else quantisation
        assert torch.equal(tensors[name][:].float(), requantised(value, kind)), name


def test_rotary_rows_of_biases_come_back_too(tmp_path):
    make_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    expected = load_file(tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(write_gguf(tmp_path))
    assert checkpoint.hf_config().attention_bias and checkpoint.hf_config().mlp_bias
    tensors = {t.name: t[:] for t in placed(checkpoint)}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_a_slice_is_a_part_of_the_whole(tmp_path, quantisation):
    make_checkpoint(tmp_path, "llama", num_key_value_heads=4)
    for tensor in open_checkpoint(write_gguf(tmp_path, quantisation)).tensors():
        whole = tensor[:]
        assert torch.equal(tensor[5:23], whole[5:23])
        if whole.dim() == 2:
            assert torch.equal(tensor[:, 16:40], whole[:, 16:40])
            assert torch.equal(tensor[3:9, 32:64], whole[3:9, 32:64])
            assert tensor[4:4].shape == whole[4:4].shape


def test_a_slice_decodes_only_the_blocks_it_touches(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, "qwen3")
    decoded = []
    decode = GGUFTensor._decode
    monkeypatch.setattr(
        GGUFTensor, "_decode", lambda self, part: decoded.append(part.shape) or decode(self, part)
    )
    tensors = {t.name: t for t in placed(open_checkpoint(write_gguf(tmp_path, "Q8_0")))}
    down = tensors["model.layers.0.mlp.down_proj.weight"]  # [64, 96]: a row is 3 blocks of 34 bytes
    down[8:16], down[:, 32:64], down[:, 40:60]
    assert decoded == [(8, 102), (64, 34), (64, 34)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "overrides", [{}, {"head_dim": 32}, {"rope_theta": 5e5, "rms_norm_eps": 1e-5}], ids=str
)
def test_the_config_comes_back(tmp_path, architecture, overrides):
    if architecture in ("qwen2", "qwen2_moe") and "head_dim" in overrides:
        pytest.skip("Qwen2 has no head_dim of its own")
    make_checkpoint(tmp_path, architecture, **overrides)
    expected = open_checkpoint(tmp_path).hf_config()
    config = open_checkpoint(write_gguf(tmp_path)).hf_config()
    assert type(config) is type(expected)
    assert config.architectures == expected.architectures
    fields = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    )
    for field in (*fields.split(), "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "dtype"):
        if hasattr(expected, field):
            assert getattr(config, field) == getattr(expected, field), field
    assert config.rope_parameters == expected.rope_parameters
    assert config.windows == expected.windows
    assert config.local_rope_parameters == expected.local_rope_parameters
    assert config.query_pre_attn_scalar == expected.query_pre_attn_scalar


def gemma_config(folder: Path, **metadata) -> DecoderConfig:
    """Of a file of Gemma 3 with seven layers and this metadata."""
    checkpoint = open_checkpoint(write_gguf(make_checkpoint(folder, "gemma3")))
    checkpoint.metadata["gemma3.block_count"] = 7
    del checkpoint.metadata["gemma3.attention.sliding_window_pattern"]
    for key, value in metadata.items():
        checkpoint.metadata["gemma3." + key.replace("__", ".")] = value
    return checkpoint.hf_config()


def test_every_sixth_layer_of_gemma_attends_to_all_unless_the_file_says_otherwise(tmp_path):
    config = gemma_config(tmp_path)
    assert config.windows == (24,) * 5 + (0, 24)
    assert gemma_config(tmp_path, attention__sliding_window_pattern=3).windows == (24, 24, 0, 24, 24, 0, 24)
    config = gemma_config(tmp_path, attention__sliding_window=0)
    assert config.windows == (0,) * 7
    assert {*transformers.Gemma3TextConfig(**config.raw).layer_types} == {"full_attention"}


def test_layers_of_gemma_with_a_window_have_rotations_of_their_own(tmp_path):
    scaling = dict(rope__scaling__type="linear", rope__scaling__factor=8.0, rope__freq_base=5e5)
    config = gemma_config(tmp_path, **scaling)
    assert (config.rope_parameters["factor"], config.rope_parameters["rope_theta"]) == (8, 5e5)
    local = config.local_rope_parameters
    assert (local["rope_type"], local["rope_theta"]) == ("default", 1e4)
    assert gemma_config(tmp_path, rope__freq_base_swa=2e4).local_rope_parameters["rope_theta"] == 2e4


@pytest.mark.parametrize("layers, divisor", [(7, 32), (62, 64 / 4)])
def test_gemma_divides_scores_by_the_size_of_a_head_but_in_the_largest_model(tmp_path, layers, divisor):
    sizes = dict(attention__key_length=32, attention__value_length=32, rope__dimension_count=32)
    assert gemma_config(tmp_path, block_count=layers, **sizes).query_pre_attn_scalar == divisor


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        ({"attention__sliding_window_pattern": [True] * 7}, "sliding_window_pattern must be one int"),
        ({"attention__sliding_window": -1}, "sliding_window must be an integer from 1"),
    ],
    ids=str,
)
def test_what_gemma_files_may_say_and_the_model_does_not_have_is_refused(tmp_path, metadata, message):
    with pytest.raises(ValueError, match=f"model.gguf: .*{message}"):
        gemma_config(tmp_path, **metadata)


# With few tokens to choose from, the best one is further ahead than what is rounded otherwise on two ranks.
FEW_TOKENS = dict(vocab_size=16, hidden_size=128, intermediate_size=256, num_key_value_heads=4, head_dim=32)


# A file with a mixture of types, as llama.cpp makes them.
IN_BLOCKS = dict(hidden_size=256, intermediate_size=256, head_dim=64)
MIXTURES = {
    "Q4_K": {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"},
    "Q5_K": {"": "Q5_K", "attn_k": "Q8_0", "attn_output": "Q5_1", "ffn_up": "Q5_0"},
    "Q3_K": {"": "Q3_K", "attn_v": "Q5_K", "ffn_down": "Q2_K", "token_embd": "Q6_K"},
    "IQ4_XS": {"": "IQ4_XS", "attn_v": "IQ4_NL", "ffn_down": "IQ4_NL", "token_embd": "Q6_K"},
    "experts": {"": "Q4_K", "ffn_down_exps": "Q6_K", "token_embd": "Q6_K"},
    "unlike experts": {"": "Q8_0", "ffn_gate_exps": "Q4_K", "ffn_down_exps": "Q4_1"},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "architecture, mixture, seed",
    [
        ("llama", "Q4_K", 0),
        ("qwen3", "Q5_K", 0),
        ("gemma3", "Q4_K", 0),
        ("qwen3", "Q3_K", 0),
        ("llama", "IQ4_XS", 1),
        ("qwen3_moe", "experts", 91),
        ("qwen3_moe", "unlike experts", 9),
    ],
)
def test_greedy_tokens_are_those_of_transformers_on_the_dequantised_weights(
    tmp_path, architecture, mixture, seed, dtype
):
    file = make_file(tmp_path, architecture, mixture, seed)
    theirs = load_reference(tmp_path)
    prompts = [[1, 2, 3], [*range(16)], [7] * 40]
    # Compiled steps, which round in another way, have tests of their own (extensions/cpu).
    options = dict(device="cpu", dtype=dtype, enforce_eager=True, kvcache_block_size=16)
    with LLM(str(file), **options, num_kvcache_blocks=40) as llm:
        results = llm.generate(prompts, SamplingParams(0, 6, True), use_tqdm=False)
    for prompt, result in zip(prompts, results, strict=True):
        assert_greedy(theirs, prompt, result["token_ids"])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("mixture", ["experts", "unlike experts"])
def test_experts_of_a_file_answer_on_a_gpu_as_their_dequantised_weights(tmp_path, mixture):
    file = make_file(tmp_path, "qwen3_moe", mixture, 9)
    prompts = [[i, *range(i % 7), 3, i % 5] for i in range(16)]
    with LLM(str(file), dtype="bfloat16", kvcache_block_size=16, num_kvcache_blocks=200) as llm:
        results = llm.generate(prompts, SamplingParams(0, 20, True), use_tqdm=False)
        weights = llm.model_runner.model.model.layers[0].mlp.experts.weights
    assert isinstance(weights.down, QuantisedWeight)
    assert isinstance(weights.gate_up, QuantisedWeight if mixture == "experts" else torch.Tensor)
    assert_answers_as(tmp_path, prompts, results)


def make_file(folder: Path, architecture: str, mixture: str, seed: int) -> Path:
    """A GGUF file beside the folder, which has the same weights, dequantised."""
    experts = {"moe_intermediate_size": 256} if architecture == "qwen3_moe" else {}
    make_checkpoint(folder, architecture, seed, tokenizer=False, **FEW_TOKENS | IN_BLOCKS | experts)
    if experts:
        redraw(folder, seed)
    file = write_gguf(folder, MIXTURES[mixture]).rename(folder.with_suffix(".gguf"))
    tensors = {tensor.name: tensor[:].contiguous() for tensor in placed(open_checkpoint(file))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return file


@pytest.mark.parametrize(
    "architecture, quantisation, seed", [slow("qwen3", "Q4_0", 3), ("llama", "Q8_0", 18)]
)
def test_two_ranks_of_a_packed_file_answer_as_one(tmp_path, architecture, quantisation, seed):
    make_checkpoint(tmp_path, architecture, seed, tokenizer=False, **FEW_TOKENS)
    options = dict(device="cpu", dtype="bfloat16", kvcache_block_size=16, num_kvcache_blocks=40)
    options["model"] = str(write_gguf(tmp_path, quantisation))
    prompts = [[1, 2, 3], [*range(16)], [7] * 17]
    answers = []
    for size in (1, 2):
        with LLM(**options, tensor_parallel_size=size) as llm:
            layer = llm.model_runner.model.model.layers[0]
            for linear, rows in (layer.self_attn.qkv_proj, 384), (layer.mlp.gate_up_proj, 512):
                [product] = linear.matrix.runs
                assert isinstance(product, PackedCodes) and linear.matrix.shape == (rows // size, 128)
            answers.append(llm.generate(prompts, SamplingParams(0, 6, True, logprobs=2), use_tqdm=False))
    for one, two in zip(*answers, strict=True):
        for first, second in (list(step.values())[:2] for step in one["logprobs"]):
            assert abs(first.logprob - second.logprob) > 0.2
        assert one["token_ids"] == two["token_ids"]


@pytest.mark.parametrize("kind, seed", [("Q4_0", 174), ("Q8_0", 163)])
def test_experts_stay_packed_and_two_ranks_answer_as_one(tmp_path, kind, seed):
    sizes = FEW_TOKENS | dict(moe_intermediate_size=128)
    make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False, **sizes)
    redraw(tmp_path, seed)
    options = dict(device="cpu", dtype="bfloat16", kvcache_block_size=16, num_kvcache_blocks=40)
    options["model"] = str(write_gguf(tmp_path, kind))
    prompts = [[1, 2, 3], [*range(16)], [7] * 17]
    answers = []
    for size in (1, 2):
        with LLM(**options, tensor_parallel_size=size) as llm:
            weights = llm.model_runner.model.model.layers[0].mlp.experts.weights
            assert type(weights.gate_up) is type(weights.down) is PackedCodes
            assert weights.gate_up.shape == (8 * 256 // size, 128)
            assert weights.down.shape == (8 * 128, 128 // size)
            answers.append(llm.generate(prompts, SamplingParams(0, 6, True, logprobs=2), use_tqdm=False))
    assert sum(map(agree_where_clear, *answers)) > 9


def agree_where_clear(one, two) -> int:
    """Of how many tokens: up to the first whose two likeliest are so near that rounding may decide."""
    gaps = [[each.logprob for each in list(step.values())[:2]] for step in one["logprobs"]]
    count = next((i for i, (first, second) in enumerate(gaps) if abs(first - second) <= 0.2), len(gaps))
    assert one["token_ids"][:count] == two["token_ids"][:count]
    return count


@pytest.mark.parametrize("width, kind", [(128, PackedCodes), (96, torch.Tensor)])
def test_experts_are_the_same_read_one_by_one_or_many_at_once(tmp_path, monkeypatch, width, kind):
    make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False, **FEW_TOKENS, moe_intermediate_size=width)
    checkpoint, found = open_checkpoint(write_gguf(tmp_path, "Q8_0")), []
    for size in (1, 3 * 128 * 136, 2**26):
        monkeypatch.setattr(quantised_gguf, "JOINED", size)
        with torch_defaults(torch.bfloat16, torch.device("cpu")):
            model = build_model(checkpoint.hf_config())
        load_model(model, checkpoint)
        found.append(model.model.layers[1].mlp.experts.weights.gate_up)
        assert type(found[-1]) is kind
    matrices = [each.dequantise() if kind is PackedCodes else each for each in found]
    assert torch.equal(matrices[0], matrices[1]) and torch.equal(matrices[0], matrices[2])
    assert matrices[0].shape == (8 * 2 * width, 128)


@pytest.mark.parametrize("number", [0, 3, 7])
def test_an_adapter_changes_a_packed_expert(tmp_path, number):
    def change(tensors, _model, _known):
        for tensor in tensors:
            is_changed = tensor.name.endswith(f"experts.{number}.up_proj.weight")
            yield MadeTensor(tensor.file, tensor.name, tensor[...] + 1) if is_changed else tensor

    make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False, **FEW_TOKENS, moe_intermediate_size=128)
    checkpoint = open_checkpoint(write_gguf(tmp_path, "Q8_0"))
    checkpoint.changes += (change,)
    with torch_defaults(torch.bfloat16, torch.device("cpu")):
        model = build_model(checkpoint.hf_config())
    load_model(model, checkpoint)
    tensors = {tensor.name: tensor[:] for tensor in placed(checkpoint)}
    found = model.model.layers[1].mlp.experts.weights.gate_up.unflatten(0, (8, 2, 128))
    for expert in range(8):
        for part, matrix in enumerate(("gate", "up")):
            expected = tensors[f"model.layers.1.mlp.experts.{expert}.{matrix}_proj.weight"]
            expected = expected + (expert == number and part == 1)
            assert (found[expert, part] - expected).abs().max() < 2e-2, (expert, matrix)


@pytest.mark.parametrize("stored", ["F32", "BF16", "Q8_0"])
def test_a_matrix_of_a_file_goes_where_the_model_is(tmp_path, stored, monkeypatch):
    """Also where it is not packed, or an adapter has changed it."""
    monkeypatch.setattr(quantised_gguf, "check_finite", lambda values: None)
    make_checkpoint(tmp_path, tokenizer=False, **FEW_TOKENS)
    for tensor in placed(open_checkpoint(write_gguf(tmp_path, stored))):
        if len(tensor.shape) == 2:
            with torch.device("meta"):
                weight = quantised_gguf.GGUF({None: Shard(tensor.shape)})
            weight.stored["weight"].load(MadeTensor("", "", tensor[...]), Shard(tensor.shape))
            assert weight.parameters["0"].is_meta


def test_other_ranks_get_what_an_adapter_changes(tmp_path):
    tiny_checkpoints.make_checkpoint(tmp_path, "qwen3", tokenizer=False, **FEW_TOKENS)
    checkpoint = open_checkpoint(write_gguf(tmp_path, "F32"))
    [change, other] = pickle.loads(pickle.dumps(checkpoint)).changes
    assert (change.__name__, other) == ("placed", with_names_of)
    checkpoint.changes = (sorted,)
    assert pickle.loads(pickle.dumps(checkpoint)).changes == (sorted,)


@pytest.mark.parametrize(
    "stored, dtype", [("Q8_0", None), ("F16", None), ("BF16", "bfloat16"), ("F32", "float32")]
)
def test_only_a_file_whose_converter_kept_the_dtype_names_it(tmp_path, stored, dtype):
    make_checkpoint(tmp_path)
    config = open_checkpoint(write_gguf(tmp_path, stored)).hf_config()
    assert config.dtype == dtype


@pytest.mark.parametrize(
    "stored, multiplies_bfloat16, expected",
    [
        ({"": "Q4_0", "token_embd": "Q8_0"}, True, torch.bfloat16),
        ("Q4_0", False, torch.float32),
        ({"": "Q8_0", "token_embd": "Q4_0"}, True, torch.float32),
        ({"": "Q2_K", "token_embd": "Q8_0"}, True, torch.bfloat16),
        ("F16", True, torch.float32),
    ],
    ids=str,
)
def test_a_cpu_computes_files_of_few_bits_in_bfloat16_if_it_multiplies_that(
    tmp_path, stored, multiplies_bfloat16, expected, monkeypatch
):
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: multiplies_bfloat16)
    checkpoint = open_checkpoint(write_gguf(make_checkpoint(tmp_path, **IN_BLOCKS), stored))
    assert Config("a model", device="cpu").with_checkpoint(checkpoint).torch_dtype == expected
    given = Config("a model", device="cpu", dtype="float16").with_checkpoint(checkpoint)
    assert given.torch_dtype == torch.float16


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_the_same_from_gguf_and_safetensors(tmp_path, architecture):
    make_checkpoint(tmp_path, architecture)
    models = []
    for source in (tmp_path, write_gguf(tmp_path)):
        config = open_checkpoint(source).hf_config()
        models.append(get_model_class(config)(config))
        load_model(models[-1], open_checkpoint(source))
    ours, theirs = (model.state_dict() for model in models)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_are_decoded_where_they_will_be(tmp_path, monkeypatch, device):
    make_checkpoint(tmp_path)
    checkpoint = open_checkpoint(write_gguf(tmp_path, "Q8_0"))
    config = checkpoint.hf_config()
    model = get_model_class(config)(config).to(device)
    devices = []
    monkeypatch.setattr(
        "nanovllm.extensions.checkpoints.gguf_file.decode_values",
        lambda encoded, kind, where: devices.append(where.type) or decode_values(encoded, kind, where),
    )
    load_model(model, checkpoint)
    assert {*devices} == {device}
    stored = {tensor.name: tensor[:].cpu() for tensor in placed(checkpoint)}
    embedding = model.model.embed_tokens.weight
    assert embedding.device.type == device
    assert torch.equal(embedding.cpu(), stored["model.embed_tokens.weight"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_can_have_the_shape_of_a_file_and_random_weights(tmp_path, architecture):
    make_checkpoint(tmp_path, architecture)
    file = write_gguf(tmp_path)
    config = open_checkpoint(file, "dummy").hf_config()
    model = get_model_class(config)(config)
    load_model(model, open_checkpoint(file, "dummy"))
    assert torch.equal(model.model.norm.weight, torch.ones(64))


# Rotary scaling


def test_linear_scaling_is_read(tmp_path):
    make_checkpoint(tmp_path, "llama")
    file = write_gguf(tmp_path, ARCH__rope__scaling__type="linear", ARCH__rope__scaling__factor=4.0)
    rope = open_checkpoint(file).hf_config().rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 4.0, 10000.0)
    assert open_checkpoint(file).hf_config().context_limit == 4 * 512


def test_yarn_scaling_is_read(tmp_path):
    make_checkpoint(tmp_path, "qwen3")
    scaling = dict(ARCH__rope__scaling__type="yarn", ARCH__rope__scaling__factor=4.0)
    file = write_gguf(tmp_path, **scaling, ARCH__rope__scaling__original_context_length=128)
    config = open_checkpoint(file).hf_config()
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 128)
    assert config.context_limit == 512


def rope_of(folder: Path, architecture: str = "llama", **keys) -> dict:
    """The rotary settings of a file with these keys "ARCH.rope." of which "scaling." is left out."""
    checkpoint = open_checkpoint(write_gguf(make_checkpoint(folder, architecture)))
    for key, value in keys.items():
        name = key if key.startswith("scale_") or key == "magic" else f"scaling.{key}"
        checkpoint.metadata[f"{architecture}.rope.{name}"] = value
    return checkpoint.hf_config().rope_parameters


def test_scaling_is_linear_unless_the_file_says_otherwise(tmp_path):
    for keys in ({"factor": 4.0}, {"scale_linear": 4.0}, {"factor": 4.0, "scale_linear": 2.0}):
        rope = rope_of(tmp_path, **keys)
        assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)
    for keys in ({"factor": 0.0}, {"type": "linear"}, {"type": "none", "factor": 4.0}, {"scale_linear": 1.0}):
        assert rope_of(tmp_path, **keys)["rope_type"] == "default"


@pytest.mark.parametrize("keys", [{}, {"factor": 4.0}, {"type": "yarn", "factor": 4.0}], ids=str)
def test_rotations_are_multiplied_by_attn_factor(tmp_path, keys):
    tables = [
        get_rope(16, 8, rope_of(tmp_path, **keys, **factor)).cos_sin_cache
        for factor in ({}, {"attn_factor": 0.5})
    ]
    assert torch.equal(tables[0] / 2, tables[1])


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"type": "longrope"}, "'longrope' is not known"),
        ({"yarn_ext_factor": 0.0}, "rope.scaling.yarn_ext_factor = 0.0 is not supported, only 1"),
        ({"yarn_attn_factor": 0.878}, "rope.scaling.yarn_attn_factor = 0.878 is not supported, only 1"),
        ({"magic": 1.0}, "llama.rope.magic is not supported"),
        ({"attn_factor": float("nan")}, "attn_factor must be a number from"),
    ],
    ids=str,
)
def test_scaling_that_is_not_computed_is_refused_by_name(tmp_path, keys, message):
    with pytest.raises(ValueError, match=f"model.gguf: .*{message}"):
        rope_of(tmp_path, **keys)


def test_attn_factor_is_refused_for_the_two_rotations_of_gemma(tmp_path):
    with pytest.raises(ValueError, match="attn_factor is not supported for gemma3, only 1"):
        rope_of(tmp_path, "gemma3", attn_factor=0.5)
    assert rope_of(tmp_path, "gemma3", attn_factor=1.0, yarn_attn_factor=1.0)["rope_type"] == "default"


def test_llama3_scaling_comes_as_factors_and_gives_the_frequencies_of_transformers(tmp_path):
    llama3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
    make_checkpoint(tmp_path, "llama", rope_scaling={"rope_type": "llama3", **llama3})
    scaled = load_reference(tmp_path).model.rotary_emb.inv_freq
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    file = write_gguf(tmp_path, extra_tensors=[("rope_freqs.weight", plain / scaled)])
    checkpoint = open_checkpoint(file)
    config = checkpoint.hf_config()
    rope = config.rope_parameters
    assert rope["rope_type"] == "frequency_factors" and config.context_limit == 512
    torch.testing.assert_close(plain / torch.tensor(rope["factors"]), scaled)
    load_model(get_model_class(config)(config), checkpoint)
    checkpoint.metadata["llama.rope.scaling.factor"] = 2.0  # divides them besides
    twice = checkpoint.hf_config().rope_parameters["factors"]
    torch.testing.assert_close(torch.tensor(twice), 2 * torch.tensor(rope["factors"]))
    checkpoint.metadata["llama.rope.scaling.type"] = "yarn"
    with pytest.raises(ValueError, match="rope_freqs.weight beside YaRN is not supported"):
        checkpoint.hf_config()


# Tokenizers


def test_smollm2_cuts_digits_one_by_one(smollm2_gguf):  # noqa: F811
    tokenizer = open_checkpoint(smollm2_gguf).tokenizer()
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("What is 1234?")]
    assert pieces == ["What", " is", " ", "1", "2", "3", "4", "?"]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("a   12")] == ["a", "   ", "1", "2"]


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  two   spaces",
        "tab\tand\n\nlines\r\n",
        "naïve Grüße 汉字",
        "🙂👩‍👩‍👧",
        "x = y[3:14]",
        "\x00",
    ],
)
def test_smollm2_text_survives_a_round_trip(smollm2_gguf, text):  # noqa: F811
    tokenizer = open_checkpoint(smollm2_gguf).tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_smollm2_special_tokens_are_special(smollm2_gguf):  # noqa: F811
    checkpoint = open_checkpoint(smollm2_gguf)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, *tokenizer.encode("user"), 2]
    assert tokenizer.decode([1, *tokenizer.encode("user"), 2], skip_special_tokens=True) == "user"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert checkpoint.eos_token_ids(tokenizer) == (2, 0)  # and <|endoftext|>


def test_smollm2_chat_template_renders(smollm2_gguf):  # noqa: F811
    tokenizer = open_checkpoint(smollm2_gguf).tokenizer()
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n") and text.endswith(
        "user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_loads_whole(smollm2_gguf):  # noqa: F811
    checkpoint = open_checkpoint(smollm2_gguf)
    config = checkpoint.hf_config()
    assert config.tie_word_embeddings and config.rope_parameters["rope_theta"] == 100_000
    model = get_model_class(config)(config)
    load_model(model, checkpoint)
    assert sum(param.numel() for param in model.parameters()) == 134_515_008


@pytest.mark.parametrize(
    "pre, pieces",
    [
        ("gpt-2", ["11", "111"]),
        ("smollm", ["1", "1", "1", "1", "1"]),
        ("qwen2", ["1", "1", "1", "1", "1"]),
        ("llama-bpe", ["111", "11"]),
        ("gpt-4o", ["111", "11"]),
        ("tekken", ["1", "1", "1", "1", "1"]),
        ("deepseek-llm", ["11", "111"]),
        ("deepseek-v3", ["111", "11"]),
        ("falcon", ["111", "11"]),
    ],
)
def test_each_kind_of_splitting_cuts_digits_its_way(pre, pieces):
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre))
    assert tokenizer.tokenize("11111") == pieces
    assert tokenizer.decode(tokenizer.encode("aé 11\n🙂 ")) == "aé 11\n🙂 "


# Contractions, numbers, scripts with and without capitals, marks, signs, spaces at line ends.
TEXTS = [
    "I'm sure THEY'LL pay 1234567 for it, don't you?\n\n  yes\r\n",
    "naïve Grüße  汉字かな한국어 ١٢٣ Ⅷ½ ابت",
    "def f(x):\n\treturn x_1+y[23]*'s  ",
    "e\u0301clair हिन्दी ǅungla 🙂👩\u200d👧 http://a.b/c\n",
    "  HTTPServer camelCase ABCdef ʰ\u3000。「x」 𝐀 ǀ ა Ა ꭰ ",
]


def pieces_of(pre: str, text: str) -> list[str]:
    """As cut by the tokenizer, where no two pieces merge."""
    steps = tokenizer_from_gguf(byte_level_metadata(pre)).backend_tokenizer.pre_tokenizer
    return [text[start:end] for _, (start, end) in steps.pre_tokenize_str(text)]


def cut_by_regexes(pre: str, text: str) -> list[str]:
    """The same by another engine for regexes."""
    pieces = [text]
    for each in SPLITS[pre]:
        cuts = [regex.split(f"({each})", piece) for piece in pieces]
        pieces = [piece for cut in cuts for piece in cut if piece]
    return pieces


@pytest.mark.parametrize("pre", [names.split()[0] for names, _ in CUTS])
@pytest.mark.parametrize("text", TEXTS)
def test_text_is_cut_as_its_regexes_say(pre, text):
    assert pieces_of(pre, text) == cut_by_regexes(pre, text)


@pytest.mark.parametrize(
    "pre, steps",
    [
        ("gpt-2", [ByteLevel(add_prefix_space=False)]),
        ("command-r", [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
        ("qwen2", [Split(Regex(PRETOKENIZE_REGEX), "isolated")]),
        ("llama3", [Split(Regex(LLAMA_3), "isolated")]),
    ],
    ids=["gpt-2", "command-r", "qwen2", "llama3"],
)
@pytest.mark.parametrize("text", TEXTS)
def test_text_is_cut_as_by_the_original(pre, steps, text):
    cut = Sequence(steps).pre_tokenize_str(text)
    assert pieces_of(pre, text) == [text[start:end] for _, (start, end) in cut]


@pytest.mark.parametrize("pre, tokens", [("gpt-2", 3), ("falcon3", 1), ("tekken", 1)])
def test_some_kinds_know_words_that_no_merges_lead_to(pre, tokens):
    metadata = byte_level_metadata(pre)
    metadata |= {"tokenizer.ggml.merges": []}
    metadata["tokenizer.ggml.tokens"][256] = "the"
    assert len(tokenizer_from_gguf(metadata).tokenize("the")) == tokens


def test_capitals_begin_words_where_tokenizers_were_trained_so():
    for pre in ("tekken", "gpt-4o"):
        assert pieces_of(pre, "HTTPServer camelCase.\n/") == ["HTTPServer", " camel", "Case", ".\n/"]
    assert pieces_of("gpt-4o", "THEY'LL") == ["THEY'LL"] and len(pieces_of("tekken", "THEY'LL")) == 2
    assert pieces_of("deepseek-v3", "_Name 汉字かな") == ["_Name", " ", "汉字かな"]
    assert pieces_of("deepseek-coder", "a b\n12") == ["a", " b", "\n", "1", "2"]


@pytest.mark.parametrize("pre", [None, "default"])
def test_where_no_splitting_is_named_the_architecture_decides_or_a_warning_is_given(pre):
    metadata = byte_level_metadata(pre)
    if pre is None:
        del metadata["tokenizer.ggml.pre"]
    for architecture in ("qwen2", "qwen3"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tokenizer = tokenizer_from_gguf(metadata | {"general.architecture": architecture})
        assert tokenizer.tokenize("111") == ["1", "1", "1"]
    with pytest.warns(UserWarning, match=f"tokenizer.ggml.pre is {pre!r}.*cut as by GPT-2"):
        tokenizer = tokenizer_from_gguf(metadata | {"general.architecture": "llama"})
    assert tokenizer.tokenize("111") == ["111"]


@pytest.mark.parametrize("pre", SPLITS)
@pytest.mark.filterwarnings("ignore:tokenizer.ggml.pre is")
def test_only_qwen_composes_characters(pre):
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == ("\u00e9" if pre == "qwen2" else "e\u0301")


def test_unknown_kinds_of_tokenizers_are_refused_by_name():
    with pytest.raises(ValueError, match="'kimi-k2' is not known"):
        tokenizer_from_gguf(byte_level_metadata("kimi-k2"))
    with pytest.raises(ValueError, match="'bert' is not known"):
        tokenizer_from_gguf(metadata_of("bert", ["a"]))
    assert tokenizer_from_gguf({}) is None


@pytest.mark.parametrize("pre, usual", [("qwen2", False), ("llama-bpe", True), ("tekken", True)])
def test_bos_is_added_where_the_file_says_so_and_else_where_its_kind_has_it(pre, usual):
    for said, added in (({}, usual), ({"add_bos_token": True}, True), ({"add_bos_token": False}, False)):
        tokenizer = tokenizer_from_gguf(byte_level_metadata(pre, bos_token_id=258, **said))
        assert (tokenizer.encode("a")[0] == 258) == added


def test_sentencepiece_merges_by_score_and_spells_the_unknown_in_bytes():
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
        "bb",
    ]
    scores = [0.0] * 262 + [-1.0, -2.0, -3.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 6
    ids = dict(bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    tokenizer = tokenizer_from_gguf(metadata_of("llama", tokens, types, scores=scores, **ids))
    assert tokenizer.tokenize("ab") == ["▁", "ab"]
    assert tokenizer.tokenize("abb a") == ["▁", "ab", "b", "▁a"]
    assert tokenizer.encode("é")[0] == 1
    assert tokenizer.tokenize("é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab é 🙂  b"), skip_special_tokens=True) == "ab é 🙂  b"


def test_every_end_that_the_file_names_is_an_eos_id(tmp_path):
    make_checkpoint(tmp_path)
    tokens = byte_level_metadata("qwen2")["tokenizer.ggml.tokens"]
    checkpoint = open_checkpoint(
        write_gguf(
            tmp_path,
            tokenizer__ggml__tokens=tokens,
            tokenizer__ggml__eos_token_id=3,
            tokenizer__ggml__eot_token_id=4,
        )
    )
    assert checkpoint.tokenizer() is None
    assert set(checkpoint.eos_token_ids(None)) == {3, 4, 258}
    tokens[7] = "<end_of_turn>"
    checkpoint.metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eom_token_id": 5}
    assert set(checkpoint.eos_token_ids(None)) == {3, 4, 5, 7, 258}


def ends_of(checkpoint, tokens: list[str], types: list[int] | None) -> set[str]:
    checkpoint.metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    return {tokens[i] for i in checkpoint.eos_token_ids(None)}


def test_control_tokens_that_end_a_turn_are_known_by_their_text(tmp_path):
    checkpoint = open_checkpoint(write_gguf(make_checkpoint(tmp_path)))
    others = ["a", "<|start|>"]
    for ends in (
        ["<|im_end|>", "<|endoftext|>"],  # Qwen's, both of which end in its folder
        ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
        ["<|end|>", "<EOT>", "_<EOT>"],
        ["<|return|>", "<|call|>"],
    ):
        tokens = [*others, *ends]
        assert ends_of(checkpoint, tokens, [3] * len(tokens)) == {*ends}
        assert ends_of(checkpoint, tokens, None) == {*ends}
        assert ends_of(checkpoint, tokens, [1] * len(tokens)) == {*ends} & {"<|im_end|>"}
    harmony = ["<|end|>", "<|return|>", "<|call|>"]
    assert ends_of(checkpoint, harmony, [3, 3, 3]) == {"<|return|>", "<|call|>"}
    assert ends_of(checkpoint, harmony, [3, 3, 1]) == {"<|end|>", "<|return|>"}
    assert ends_of(checkpoint, harmony, [3]) == {"<|return|>", "<|call|>"}


# Hostile files


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'mamba' is not known; known ones: llama, smollm3, exaone, qwen2"):
        open_checkpoint(tmp_path / "model.gguf")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


HUGE = 2**63
HEADER = b"GGUF" + struct.pack("<I", 3)
DAMAGED = {
    "empty": b"",
    "other magic": b"GGML" + bytes(100),
    "only a magic": b"GGUF",
    "version 99": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "absurd number of tensors": HEADER + struct.pack("<QQ", HUGE, 0) + bytes(1000),
    "absurd number of keys": HEADER + struct.pack("<QQ", 0, HUGE) + bytes(1000),
    "absurd length of a key": HEADER + struct.pack("<QQQ", 0, 1, HUGE) + bytes(1000),
    "absurd array of numbers": HEADER
    + struct.pack("<QQ", 0, 1)
    + text(b"a")
    + struct.pack("<IIQ", 9, 4, HUGE),
    "absurd array of texts": HEADER
    + struct.pack("<QQ", 0, 1)
    + text(b"a")
    + struct.pack("<IIQ", 9, 8, 10**6),
    "array of arrays": HEADER + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IIQ", 9, 9, 1) * 1000,
    "unknown type": HEADER + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<I", 77),
    "text that is no UTF-8": HEADER + struct.pack("<QQ", 0, 1) + text(b"\xff"),
    "tensor of unknown type": HEADER
    + struct.pack("<QQ", 1, 0)
    + text(b"a")
    + struct.pack("<IQIQ", 1, 8, 999, 0),
    "tensor of absurd size": HEADER
    + struct.pack("<QQ", 1, 0)
    + text(b"a")
    + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0),
    "tensor of absurd dimensions": HEADER + struct.pack("<QQ", 1, 0) + text(b"a") + struct.pack("<I", 2**31),
    "tensor beyond the end": HEADER
    + struct.pack("<QQ", 1, 0)
    + text(b"a")
    + struct.pack("<IQIQ", 1, 8, 0, HUGE),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_an_error_naming_it_at_once(tmp_path, damage):
    file = tmp_path / "model.gguf"
    file.write_bytes(DAMAGED[damage])
    start = time.perf_counter()
    with pytest.raises(ValueError, match="model.gguf is not a complete GGUF file"):
        open_checkpoint(file)
    assert time.perf_counter() - start < 2


def test_overlapping_tensors_are_refused(tmp_path):
    tensors = b"".join(text(name) + struct.pack("<IQIQ", 1, 8, 0, 0) for name in (b"a", b"b"))
    (tmp_path / "model.gguf").write_bytes(HEADER + struct.pack("<QQ", 2, 0) + tensors + bytes(200))
    with pytest.raises(ValueError, match="tensor 'b' overlaps"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_file_cut_anywhere_is_an_error_and_never_half_a_model(tmp_path):
    make_checkpoint(tmp_path)
    raw = write_gguf(tmp_path, "Q8_0").read_bytes()
    for length in [*range(0, len(raw) - 1, len(raw) // 150), len(raw) - 40]:
        (tmp_path / "cut.gguf").write_bytes(raw[:length])
        with pytest.raises(ValueError, match="cut.gguf"):
            open_checkpoint(tmp_path / "cut.gguf")


def test_a_sparse_file_of_any_size_is_refused_at_once(tmp_path):
    with open(tmp_path / "model.gguf", "wb") as file:
        file.write(HEADER + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IIQ", 9, 8, 2**28))
        file.truncate(2**33)
    start = time.perf_counter()
    with pytest.raises(ValueError, match="announces more than"):
        open_checkpoint(tmp_path / "model.gguf")
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    "metadata",
    [
        {"ARCH__attention__head_count": [4, 4]},
        {"ARCH__embedding_length": "64"},
        {"ARCH__block_count": 2**31},
        {"ARCH__attention__key_length": 0},
        {"ARCH__rope__freq_base": 10},
    ],
    ids=str,
)
def test_an_impossible_config_is_an_error_naming_the_file(tmp_path, metadata, monkeypatch):
    make_checkpoint(tmp_path)
    checkpoint = open_checkpoint(write_gguf(tmp_path))
    checkpoint.metadata.update(
        {key.replace("__", ".").replace("ARCH", "qwen3"): v for key, v in metadata.items()}
    )
    with pytest.raises(ValueError, match="model.gguf"):
        checkpoint.hf_config()


def test_a_damaged_tokenizer_is_an_error_naming_the_file(tmp_path):
    make_checkpoint(tmp_path)
    checkpoint = open_checkpoint(write_gguf(tmp_path))
    for metadata in (
        {"tokenizer.ggml.model": "gpt2"},
        {"tokenizer.ggml.model": ["gpt2"]},
        byte_level_metadata("qwen2", eos_token_id=10**6),
        {**byte_level_metadata("qwen2"), "tokenizer.ggml.merges": ["a", "b c"]},
        {**byte_level_metadata("qwen2"), "tokenizer.ggml.tokens": 7},
    ):
        checkpoint.metadata = metadata
        with pytest.raises(ValueError, match="model.gguf: cannot build the tokenizer"):
            checkpoint.tokenizer()


def test_a_missing_gguf_package_is_an_error_that_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(HEADER)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install nano-vllm\[demo\]"):
        open_checkpoint(tmp_path / "model.gguf")
