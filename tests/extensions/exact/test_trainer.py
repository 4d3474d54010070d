"""A transformers model made exact computes what an exact engine computes, and is trained as it was before."""

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from exact_schedules import Recorder
from smollm2 import smollm2_folder, smollm2_gguf  # noqa: F401
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.exact import check
from nanovllm.extensions.exact.trainer import logprobs, make_exact
from tiny_checkpoints import (  # noqa: F401
    SMALL,
    load_reference,
    make_checkpoint,
    make_config,
    make_tokenizer,
    one_thread,
)

# Products of the last one add over 1,536 numbers, so that another order shows in bfloat16, too.
SHAPES = {
    "qwen3": dict(head_dim=32, tie_word_embeddings=True),
    "qwen2": dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=1, intermediate_size=100),
    "llama": dict(num_hidden_layers=1, intermediate_size=1536, attention_bias=True, mlp_bias=True),
}
if transformers.__version__ >= "5":
    SHAPES["qwen3_moe"] = dict(num_hidden_layers=3, mlp_only_layers=[1], head_dim=32)
ROPES = [
    dict(rope_type="linear", factor=4.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
]
stacked = pytest.mark.skipif("qwen3_moe" not in SHAPES, reason="needs the experts of transformers 5")
LENGTHS = 5, 1, 170, 33, 64, 2, 90, 128  # of prompts
TEXT = torch.randint(SMALL["vocab_size"], (170,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [TEXT[:length] for length in LENGTHS]
MAX_TOKENS = 12
DTYPES = torch.float32, torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Drawn(NamedTuple):
    """What an engine has computed of PROMPTS."""

    completions: list[list[int]]
    logits: list[bytes]  # of each completion's tokens
    logprobs: Tensor  # [prompts, MAX_TOKENS]


def as_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().numpy())


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run_engine(folder: Path, dtype: torch.dtype, exact: bool = True, temperature: float = 1.0) -> Drawn:
    """All prompts together, which begin alike: in chunks, from the cache, and with copies inside blocks."""
    params = dict(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    recorder = Recorder()
    options = dict(device="cpu", dtype=name_of(dtype), kvcache_block_size=16, num_kvcache_blocks=100)
    options |= dict(max_num_batched_tokens=70, seed=0, logprobs_mode="processed", extensions=[recorder])
    with LLM(str(folder), exact=exact, **options) as llm:
        each = [SamplingParams(**params, extra=i) for i in range(len(PROMPTS))]
        results = llm.generate(PROMPTS, each, use_tqdm=False)
    found = recorder.take()
    told = [
        [place[token].logprob for place, token in zip(r.logprobs, r.token_ids, strict=True)] for r in results
    ]
    logits = [found[i][0] for i in range(len(PROMPTS))]
    return Drawn([result["token_ids"] for result in results], logits, torch.tensor(told))


def batch(texts: list[list[int]], side: str) -> dict[str, Tensor]:
    """Padded with a token that means something."""
    longest = max(map(len, texts)) + 3
    ids = torch.full((len(texts), longest), 7)
    mask = torch.zeros_like(ids)
    for i, text in enumerate(texts):
        place = slice(longest - len(text), longest) if side == "left" else slice(0, len(text))
        ids[i, place] = torch.tensor(text)
        mask[i, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def completions_of(logits: Tensor, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Of each row the logits that its last MAX_TOKENS tokens were drawn from."""
    rows = zip(logits, inputs["attention_mask"].bool(), strict=True)
    return [row[mask][-MAX_TOKENS - 1 : -1] for row, mask in rows]


def texts_of(drawn: Drawn) -> list[list[int]]:
    return [prompt + completion for prompt, completion in zip(PROMPTS, drawn.completions, strict=True)]


def positions_of(inputs: dict[str, Tensor]) -> Tensor:
    return (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)


def different(found: list[Tensor], drawn: Drawn) -> list[int]:
    """Which completions have other logits. Numbers: to show how long bytes differ takes pytest minutes."""
    pairs = zip(found, drawn.logits, strict=True)
    return [i for i, (logits, wanted) in enumerate(pairs) if as_bytes(logits) != wanted]


def compare_logits(model: Any, drawn: Drawn, side: str) -> list[int]:
    inputs = batch(texts_of(drawn), side)
    with torch.no_grad():
        return different(completions_of(model(**inputs).logits, inputs), drawn)


def assert_same_logits(model: Any, drawn: Drawn, side: str) -> None:
    assert compare_logits(model, drawn, side) == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        name: make_checkpoint(tmp_path_factory.mktemp(name), name, seed=3, **shape)
        for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def engine(folders):
    """What the exact engine computes, each once."""
    found = {}

    def run(name: str, dtype: torch.dtype) -> Drawn:
        if (name, dtype) not in found:
            found[name, dtype] = run_engine(folders[name], dtype)
        return found[name, dtype]

    return run


@pytest.fixture
def qwen3(folders):
    return make_exact(load_reference(folders["qwen3"]))


# The same numbers


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_a_padded_batch_are_the_engines_bit_for_bit(folders, engine, name, dtype, side):
    assert_same_logits(make_exact(load_reference(folders[name], dtype)), engine(name, dtype), side)


@pytest.mark.parametrize("name", SHAPES)
def test_without_exactness_on_either_side_they_are_not(folders, engine, name):
    """So that the test above can fail."""
    drawn = engine(name, torch.float32)
    inputs = batch(texts_of(drawn), "left")
    with torch.no_grad():
        ordinary = load_reference(folders[name])(**inputs, position_ids=positions_of(inputs)).logits
    assert different(completions_of(ordinary, inputs), drawn) == [*range(len(PROMPTS))]
    drawn = run_engine(folders[name], torch.float32, exact=False)
    assert compare_logits(make_exact(load_reference(folders[name])), drawn, "left") != []


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rotations_for_longer_contexts_are_the_engines(tmp_path, rope):
    folder = make_checkpoint(tmp_path, "llama", rope_scaling=rope, rope_theta=5000.0)
    drawn = run_engine(folder, torch.float32)
    assert_same_logits(make_exact(load_reference(folder)), drawn, "left")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_row_may_hold_several_sequences(folders, engine, dtype):
    """Without a mask: position_ids say where each begins."""
    drawn = engine("qwen3", dtype)
    texts = texts_of(drawn)
    row = torch.tensor([sum(texts, [])])
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    with torch.no_grad():
        logits = make_exact(load_reference(folders["qwen3"], dtype))(
            input_ids=row, position_ids=positions
        ).logits
    split = logits[0].split([len(text) for text in texts])
    assert different([part[-MAX_TOKENS - 1 : -1] for part in split], drawn) == []


def test_each_row_is_a_sequence_of_its_own_wherever_its_positions_begin(qwen3):
    rows = torch.tensor([TEXT[:20], TEXT[20:40]])
    positions = torch.arange(40).view(2, 20)
    with torch.no_grad():
        together = qwen3(input_ids=rows, position_ids=positions).logits
        alone = qwen3(input_ids=rows[1:], position_ids=positions[1:]).logits
    assert torch.equal(together[1], alone[0])


def test_hidden_states_of_padding_are_zeros(qwen3):
    inputs = batch(PROMPTS, "left")
    hidden = qwen3.model(**inputs).last_hidden_state
    assert not hidden[inputs["attention_mask"] == 0].any()
    assert hidden[inputs["attention_mask"] == 1].any(1).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_log_probabilities_are_those_that_the_engine_tells(folders, dtype, temperature):
    drawn = run_engine(folders["qwen2"], dtype, temperature=temperature)
    inputs = batch(texts_of(drawn), "right")
    model = make_exact(load_reference(folders["qwen2"], dtype))
    with torch.no_grad():
        logits = torch.stack(completions_of(model(**inputs).logits, inputs))
    found = logprobs(logits, torch.tensor(drawn.completions), temperature)
    assert (found - drawn.logprobs).abs().max() == 0.0


def test_inputs_of_the_decoder_may_be_given_without_names(qwen3):
    ids, mask = torch.tensor([TEXT[:5]]), torch.tensor([[0, 0, 1, 1, 1]])
    found = qwen3.model(ids, mask).last_hidden_state
    assert torch.equal(found, qwen3.model(input_ids=ids, attention_mask=mask).last_hidden_state)


def test_generate_works_without_a_cache(qwen3):
    result = qwen3.generate(torch.tensor([TEXT[:9]]), max_new_tokens=3, do_sample=False, use_cache=False)
    assert result.shape == (1, 12)


# Training


def gradients(model: Any, inputs: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Of the mean log-probability of what stands in the batch."""
    model.zero_grad()
    logits = model(**inputs, **options).logits[:, :-1].float()
    mask = inputs["attention_mask"][:, 1:] * inputs["attention_mask"][:, :-1]
    found = logits.log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
    ((found * mask).sum() / mask.sum()).backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def errors(found: list[Tensor], wanted: list[Tensor]) -> Tensor:
    pairs = zip(found, wanted, strict=True)
    return torch.stack([(mine - other).float().norm() / other.float().norm() for mine, other in pairs])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_the_ordinary_model(folders, name, side):
    inputs = batch(PROMPTS, side)
    ordinary = load_reference(folders[name])
    wanted = gradients(ordinary, inputs, position_ids=positions_of(inputs))
    assert errors(gradients(make_exact(ordinary), inputs), wanted).max() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_gradients_in_bfloat16_are_as_close_as_the_ordinary_models(folders, name, device):
    inputs = {key: tensor.to(device) for key, tensor in batch(PROMPTS, "left").items()}
    ordinary = load_reference(folders[name], torch.bfloat16).to(device)
    wanted = gradients(copy.deepcopy(ordinary).float(), inputs, position_ids=positions_of(inputs))
    usual = errors(gradients(ordinary, inputs, position_ids=positions_of(inputs)), wanted)
    assert (errors(gradients(make_exact(ordinary), inputs), wanted) < 1.5 * usual + 2e-3).all()


def test_layers_may_be_recomputed_in_the_backward_pass(qwen3):
    inputs = batch(PROMPTS, "left")
    wanted = gradients(qwen3, inputs)
    qwen3.train()
    qwen3.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(torch.equal(*pair) for pair in zip(gradients(qwen3, inputs), wanted, strict=True))


def test_gradients_of_frozen_weights_are_not_computed(qwen3):
    inputs, trained = batch(PROMPTS, "left"), "model.layers.1.self_attn.q_norm.weight"
    wanted = dict(zip(dict(qwen3.named_parameters()), gradients(qwen3, inputs), strict=True))[trained]
    for name, parameter in qwen3.named_parameters():
        parameter.requires_grad_(name == trained)
    with FlopCounterMode(display=False) as counter:
        [found] = gradients(qwen3, inputs)
    torch.testing.assert_close(found, wanted)
    layer = qwen3.model.layers[1]
    behind = layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
    products = qwen3.lm_head.weight.numel() * inputs["input_ids"].numel()
    products += sum(linear.weight.numel() for linear in behind) * int(inputs["attention_mask"].sum())
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == 2 * products  # one of each


# Mixtures of experts


def make_mixtures(**settings: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """An ordinary layer, and an exact one with the same random weights."""
    torch.manual_seed(0)
    model = make_model("qwen3_moe", num_hidden_layers=1, **settings)
    model.set_experts_implementation("eager")
    ordinary = model.model.layers[0].mlp
    for parameter in ordinary.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    model = copy.deepcopy(model)
    return ordinary, make_exact(model).model.layers[0].mlp


def gradients_of_mixture(layer: torch.nn.Module, x: Tensor, weights: Tensor) -> list[Tensor]:
    """What it makes of x, and the gradients of x and its weights."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * weights).sum().backward()
    return [y, x.grad, *(each.grad for each in layer.parameters())]


@stacked
@pytest.mark.parametrize("tokens", [1, 40])  # of which one leaves experts unused
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_a_mixture_of_experts_has_the_gradients_of_the_ordinary_one(top_k, normalise, tokens):
    layers = make_mixtures(num_experts_per_tok=top_k, norm_topk_prob=normalise)
    x, weights = torch.randn(1, tokens, 64), torch.randn(1, tokens, 64)
    wanted, mine = (gradients_of_mixture(layer, x, weights) for layer in layers)
    assert len(mine) == 5
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    learns = wanted[4].abs().max() > 1e-3  # the router does, unless one expert has all
    assert learns != (top_k == 1 and normalise)


@stacked
@pytest.mark.parametrize("device", DEVICES)
def test_in_bfloat16_they_are_as_close_as_the_ordinary_ones(device):
    """With all experts for each token: rounded logits might choose others."""
    layers = [layer.bfloat16().to(device) for layer in make_mixtures(num_experts_per_tok=8)]
    x, weights = (each.bfloat16().to(device) for each in torch.randn(2, 1, 40, 64))
    wanted = gradients_of_mixture(copy.deepcopy(layers[0]).float(), x.float(), weights.float())
    usual, found = (errors(gradients_of_mixture(layer, x, weights), wanted) for layer in layers)
    assert (found < 1.5 * usual + 2e-3).all()


@stacked
def test_of_experts_with_equal_logits_the_first_are_taken():
    _, layer = make_mixtures()
    layer.gate.weight.data.zero_()
    layer(torch.randn(1, 9, 64)).sum().backward()
    used = layer.experts.down_proj.grad.flatten(1).any(1)
    assert used.tolist() == [True] * 3 + [False] * 5


@stacked
def test_frozen_experts_cost_nothing_in_the_backward_pass(folders):
    model, inputs = make_exact(load_reference(folders["qwen3_moe"])), batch(PROMPTS, "left")
    model.set_experts_implementation("eager")  # whose products are counted
    trained = "model.layers.2.mlp.gate.weight"
    wanted = dict(zip(dict(model.named_parameters()), gradients(model, inputs), strict=True))[trained]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == trained)
    with FlopCounterMode(display=False) as counter:
        [found] = gradients(model, inputs)
    torch.testing.assert_close(found, wanted)
    config, layer = model.config, model.model.layers[2].mlp
    weights = sum(weight.numel() for weight in layer.experts.parameters())
    products = model.lm_head.weight.numel() * inputs["input_ids"].numel()  # its input's gradient
    # Experts are computed once more, for what their shares were multiplied by; and the router's gradient.
    each = layer.gate.weight.numel() + weights // config.num_experts * config.num_experts_per_tok
    products += each * int(inputs["attention_mask"].sum())
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == 2 * products
    layer.gate.weight.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        gradients(model, inputs)
    products = model.lm_head.weight.numel() * inputs["input_ids"].numel()
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == 2 * products


def test_batches_may_be_computed_before_the_gradients_of_others(qwen3):
    long, short = batch(PROMPTS, "left"), batch(PROMPTS[:2], "right")
    wanted = gradients(qwen3, long)
    qwen3.zero_grad()
    loss = qwen3(**long, labels=long["input_ids"]).loss
    qwen3(**short)
    loss.backward()
    qwen3.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(gradients(qwen3, long), wanted, strict=True))


def test_log_probabilities_have_gradients():
    logits = torch.randn(3, 4, 50, requires_grad=True)
    tokens = torch.randint(50, (3, 4))
    weights = torch.randn(3, 4)
    (logprobs(logits, tokens, 0.7) * weights).sum().backward()
    mine, logits.grad = logits.grad, None
    plain = (logits / 0.7).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    (plain * weights).sum().backward()
    torch.testing.assert_close(mine, logits.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3_moe", marks=stacked)])
def test_after_a_step_of_training_a_new_engine_agrees_again(folders, engine, tmp_path, name, dtype):
    drawn = engine(name, dtype)
    model = make_exact(load_reference(folders[name], dtype))
    names = set(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = batch(texts_of(drawn), "left")
    tokens = torch.tensor(drawn.completions)
    logits = torch.stack(completions_of(model(**inputs).logits, inputs))
    advantages = torch.linspace(-1, 1, len(tokens))[:, None]
    ratio = (logprobs(logits, tokens) - drawn.logprobs).exp()
    assert (ratio == 1).all()
    (-ratio * advantages).mean().backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert set(load_reference(tmp_path).state_dict()) == names
    after = run_engine(tmp_path, dtype)
    assert after.logits != drawn.logits
    assert_same_logits(model, after, "left")


def test_a_copy_is_exact_too(qwen3, engine):
    assert_same_logits(copy.deepcopy(qwen3), engine("qwen3", torch.float32), "right")


# What is refused


def make_model(name: str = "llama", **settings: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(make_config(name, **settings))


def test_models_that_are_not_known_are_refused():
    with pytest.raises(
        ValueError, match=r"model must be one of .*'Qwen3ForCausalLM'.*, got 'MistralForCausalLM'"
    ):
        make_exact(make_model("mistral"))
    with pytest.raises(ValueError, match=r"model must be one of .*, got 'Linear'"):
        make_exact(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(attention_dropout=0.1), "attention_dropout must be 0, got 0.1"),
        (dict(hidden_act="gelu"), "LlamaForCausalLM: hidden_act = 'gelu' is not supported, only silu"),
        (
            dict(name="qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "attention must be without a sliding window, got 8",
        ),
        (
            dict(name="qwen3_moe", use_sliding_window=True, sliding_window=8),
            "attention must be without a sliding window, got 8",
        ),
        (
            dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)),
            r"rope_type must be one of \['default', .*\], got 'dynamic'",
        ),
    ],
)
def test_settings_that_the_engine_does_not_compute_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_exact(make_model(**settings))


def test_layers_and_weights_that_are_not_ordinary_are_refused(qwen3):
    with pytest.raises(ValueError, match=r"q_proj must be an nn.Linear, got 'ExactLinear'"):
        make_exact(qwen3)
    mixed = make_model()
    mixed.lm_head.bfloat16()
    with pytest.raises(
        ValueError, match=r"weights must have one dtype .*bfloat16 on cpu', 'torch.float32 on cpu'"
    ):
        make_exact(mixed)
    with pytest.raises(ValueError, match=r"weights on a CPU must be float32 or bfloat16, got 'float16'"):
        make_exact(make_model().half())


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(output_attentions=True), "output_attentions is not possible"),
        (dict(output_hidden_states=True), "output_hidden_states is not possible"),
        (dict(output_router_logits=True), "output_router_logits is not possible"),
        (dict(past_key_values=transformers.DynamicCache()), "(past_key_values|cache) is not possible"),
        (dict(inputs_embeds=torch.zeros(1, 3, 64), input_ids=None), "inputs_embeds is not possible"),
        (
            dict(attention_mask=torch.ones(1, 1, 3, 3)),
            r"attention_mask must have the shape \[1, 3\], got \[1, 1, 3, 3\]",
        ),
    ],
)
def test_calls_that_the_engine_does_not_compute_are_refused(qwen3, options, message):
    with pytest.raises(ValueError, match=message):
        qwen3(**{"input_ids": torch.tensor([[1, 2, 3]]), **options})


@stacked
def test_the_loss_of_a_balanced_router_is_refused():
    model = make_exact(make_model("qwen3_moe", output_router_logits=True))
    with pytest.raises(ValueError, match="output_router_logits is not possible with exactness, got True"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


def test_experts_that_are_not_stacked_are_refused():
    """As those of transformers 4 are."""
    model = make_model("qwen3_moe")
    model.model.layers[1].mlp.experts = torch.nn.ModuleList()
    path = r"model\.layers\.[01]\.mlp\.experts"
    with pytest.raises(ValueError, match=path + " must be stacked, as transformers 5 has them"):
        make_exact(model)


def test_autocast_is_refused(qwen3):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast must be off"):
        qwen3(input_ids=torch.tensor([[1, 2, 3]]))


# The check


def run_check(monkeypatch: pytest.MonkeyPatch, *arguments: Any, device: str = "cpu", **options: Any) -> int:
    monkeypatch.setattr(check, "LLM", partial(LLM, device=device, **options))
    monkeypatch.setattr(sys, "argv", ["check", *map(str, arguments)])
    return check.main()


@pytest.mark.parametrize("name", SHAPES)
def test_the_check_finds_no_difference(folders, name, monkeypatch, capsys):
    arguments = folders[name], "--seqs", 11, "--tokens", 7, "--temperature", 0.7, "--compare"
    assert run_check(monkeypatch, *arguments) == 0
    ordinary, exact = capsys.readouterr().out.splitlines()
    assert exact == "exact=True: 77 tokens, largest difference of log-probabilities 0.0"
    assert ordinary.startswith("exact=False: 77 tokens, ") and not ordinary.endswith(" 0.0")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_on_a_gpu_the_check_finds_no_difference(folders, name, dtype, monkeypatch, capsys):
    arguments = folders[name], "--seqs", 50, "--tokens", 40
    assert run_check(monkeypatch, *arguments, device="cuda", dtype=dtype) == 0
    assert capsys.readouterr().out.endswith("difference of log-probabilities 0.0\n")


@pytest.mark.slow
def test_the_check_finds_no_difference_in_a_real_model(smollm2_folder, monkeypatch, capsys):  # noqa: F811
    assert run_check(monkeypatch, smollm2_folder, "--seqs", 9, "--tokens", 12, device="auto") == 0
    assert capsys.readouterr().out.endswith("difference of log-probabilities 0.0\n")


def test_the_check_fails_if_the_trainer_is_not_exact(folders, monkeypatch, capsys):
    monkeypatch.setattr(check, "make_exact", lambda model: model)
    assert run_check(monkeypatch, folders["qwen3"], "--seqs", 3, "--tokens", 5) == 1
    assert "exact=True: 15 tokens" in capsys.readouterr().out
