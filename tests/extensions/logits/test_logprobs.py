"""Log-probabilities: of which distribution, which tokens are listed, and that a row's bits are its own."""

import math

import pytest
import torch
import transformers
from engines import assert_empty
from logit_settings import PROMPT, VOCAB, Only, Penalty, processors_of

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.logits import logprobs
from nanovllm.extensions.logits.bias import BAN, rules_of
from nanovllm.extensions.logits.kernels.likelihood import token_logprobs
from nanovllm.extensions.logits.kernels.logit_edits import RULE_FIELDS
from tiny_checkpoints import EXACT, load_reference, make_checkpoint, one_thread  # noqa: F401


def some_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


# --- a row's sum ---


@pytest.mark.parametrize("vocab", [257, 1003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("processed", [False, True], ids=["raw", "processed"])
def test_a_row_has_its_bytes_in_any_company_and_with_any_threads(vocab, dtype, processed):
    logits, token_ids = some_logits(70, vocab, dtype), torch.arange(140).view(70, 2)
    given = (torch.linspace(0.3, 2, 70), torch.linspace(-4, 3, 70)) if processed else ()
    threads, alone = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            rows = zip(*(each.split(1) for each in (logits, token_ids, *given)), strict=True)
            alone.append(torch.cat([token_logprobs(*row)[0] for row in rows]))
            for count in range(1, 71):
                rows = slice(count) if count % 4 else slice(70 - count, 70)
                together, _ = token_logprobs(*(each[rows] for each in (logits, token_ids, *given)))
                assert same_bytes(together, alone[0][rows])
    finally:
        torch.set_num_threads(threads)
    assert same_bytes(*alone)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_log_softmax_of_the_quotient_to_the_last_bit(temperature, dtype):
    logits, token_ids = some_logits(40, 1000, dtype), torch.arange(40)[:, None]
    expected = (logits.float() / temperature).log_softmax(-1).gather(1, token_ids)
    found, ranks = token_logprobs(logits, token_ids, torch.full((40,), temperature))
    assert same_bytes(found, expected)
    assert ranks.tolist() == [(row > row[i]).sum().item() + 1 for i, row in enumerate(logits)]


@pytest.mark.parametrize("vocab", [20, 127, 128, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kinds", [1, 3, 50])
def test_equal_logits_are_listed_by_token_id(vocab, dtype, kinds):
    values = torch.randint(kinds, (30, vocab), generator=torch.Generator().manual_seed(1)) - 1
    logits = values.to(dtype) * torch.tensor([-1, 1]).repeat(15)[:, None]  # among them -0.0
    expected = [sorted(range(vocab), key=lambda i: (-row[i], i))[:20] for row in logits.tolist()]
    assert logprobs.top_tokens(logits, 20).tolist() == expected


# --- an engine's ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, vocab_size=VOCAB, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def reference(folder):
    return load_reference(folder)


@pytest.fixture(scope="module")
def engines(folder):
    options = dict(**EXACT, num_kvcache_blocks=60)
    with LLM(str(folder), **options) as raw, LLM(str(folder), **options, logprobs_mode="processed") as other:
        yield {"raw": raw, "processed": other}


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def llm(request, engines, monkeypatch):
    """Driven as on a CPU and as on a GPU; empty after the test."""
    monkeypatch.setattr(engines["processed"], "_overlap", request.param)
    yield engines["processed"]
    assert_empty(engines["processed"])


def generate(llm: LLM, **params) -> dict:
    params = {"temperature": 0.7, "max_tokens": 12, "ignore_eos": True, "seed": 2, **params}
    [result] = llm.generate([PROMPT], SamplingParams(**params), use_tqdm=False)
    return result


BIAS = transformers.SequenceBiasLogitsProcessor([[[7], 3.0], [[30], -2.25]])
DRAWN_WITH = {
    "nothing": ({}, []),
    "top-k": (dict(top_k=9), []),
    "top-p": (dict(top_p=0.7), []),
    "min-p": (dict(min_p=0.05), []),
    "all filters": (dict(top_k=30, top_p=0.9, min_p=0.01), []),
    "a bias": (dict(logit_bias={7: 3.0, 30: -2.25}), [BIAS]),
    "penalties": (
        dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
        [transformers.RepetitionPenaltyLogitsProcessor(1.3), Penalty(0.5, 0.4)],
    ),
    "allowed": (dict(allowed_token_ids=[*range(50, 90)]), [Only([*range(50, 90)])]),
    "all of it": (
        dict(logit_bias={7: 3.0, 30: -2.25}, frequency_penalty=0.4, top_k=40, top_p=0.95),
        [BIAS, Penalty(0, 0.4)],
    ),
}


def expected_rows(reference, params: SamplingParams, edits, token_ids: list[int]) -> torch.Tensor:
    """log_softmax of what transformers' processors make of the logits before each of these tokens."""
    rows = []
    for i in range(len(token_ids)):
        ids = torch.tensor([PROMPT + token_ids[:i]])
        with torch.no_grad():
            scores = reference(input_ids=ids).logits[:, -1]
        for processor in (*edits, *(processors_of(params) if params.temperature else ())):
            scores = processor(ids, scores)
        rows.append(scores[0].log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
@pytest.mark.parametrize("name", DRAWN_WITH)
def test_processed_ones_are_of_the_distribution_that_the_token_was_drawn_from(
    llm, reference, name, temperature
):
    """Of a greedy token as if it had been drawn at temperature 1 from all tokens."""
    options, edits = DRAWN_WITH[name]
    result = generate(llm, temperature=temperature, logprobs=20, **options)
    params = SamplingParams(temperature, **options)
    rows = expected_rows(reference, params, edits, result["token_ids"])
    for token_id, entries, row in zip(result["token_ids"], result["logprobs"], rows, strict=True):
        found = {i: entry.logprob for i, entry in entries.items()}
        assert found == pytest.approx({i: row[i].item() for i in found}, abs=1e-4)
        assert all(map(math.isfinite, found.values())), "listed, but never drawn"
        likeliest = [i for i in row.topk(20).indices.tolist() if row[i] > -math.inf]
        assert set(found) == {token_id, *likeliest}
        assert entries[token_id].rank == (row > row[token_id]).sum() + 1


def test_processed_ones_are_what_a_trainer_computes_to_the_last_bit(llm, monkeypatch):
    """From the same logits, of neighbours with other temperatures too."""
    seen, compute = [], llm.model_runner.model.compute_logits
    note = lambda hidden: (seen.append(compute(hidden).clone()), seen[-1])[1]  # noqa: E731
    monkeypatch.setattr(llm.model_runner.model, "compute_logits", note)
    temperatures = [0.7, 1.0, 1.3]
    params = [SamplingParams(t, 8, True, logprobs=0, seed=i) for i, t in enumerate(temperatures)]
    results = llm.generate([[i, *PROMPT] for i in range(3)], params, use_tqdm=False)
    for i, (temperature, result) in enumerate(zip(temperatures, results, strict=True)):
        rows = torch.stack([logits[i] for logits in seen[:8]])
        expected = (rows.float() / temperature).log_softmax(-1)
        expected = [row[token_id].item() for row, token_id in zip(expected, result["token_ids"], strict=True)]
        assert [entry.logprob for entries in result["logprobs"] for entry in entries.values()] == expected


@pytest.mark.parametrize(
    "options", [dict(logit_bias={7: 100.0}), dict(allowed_token_ids=[7]), dict(top_k=1)], ids=str
)
def test_of_logits_in_half_precision_it_is_the_changed_ones_that_count(folder, options):
    """These are copies, where float32 ones may have been changed in place."""
    with LLM(str(folder), **{**EXACT, "dtype": "bfloat16"}, logprobs_mode="processed") as llm:
        result = generate(llm, logprobs=0, temperature=1.0, **options)
        assert [entry.logprob for [entry] in map(dict.values, result["logprobs"])] == [0.0] * 12


def test_a_prompts_are_the_models_own_in_both_modes(engines):
    params = dict(prompt_logprobs=3, temperature=0.5, logit_bias={7: 50.0}, top_k=4)
    raw, processed = (generate(engines[mode], **params)["prompt_logprobs"] for mode in engines)
    assert raw == processed and len(raw) == len(PROMPT)
    assert engines["raw"].score([PROMPT], False) == engines["processed"].score([PROMPT], False)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("options", [{}, dict(top_k=4, frequency_penalty=1.0)], ids=["plain", "edited"])
def test_none_beside_the_drawn_token_costs_no_search_and_changes_no_value(
    engines, monkeypatch, mode, options
):
    llm = engines[mode]
    some = generate(llm, logprobs=5, prompt_logprobs=5, **options)
    monkeypatch.setattr(logprobs, "top_tokens", lambda *_: pytest.fail("searched"))
    alone = generate(llm, logprobs=0, prompt_logprobs=0, **options)
    assert alone["token_ids"] == some["token_ids"]
    for name, token_ids in (("logprobs", alone["token_ids"]), ("prompt_logprobs", PROMPT)):
        places = zip(token_ids, alone[name], some[name], strict=True)
        assert all(one == {i: several[i]} for i, one, several in places if one is not None)
    with pytest.raises(pytest.fail.Exception, match="searched"):
        generate(llm, logprobs=1, **options)


# --- rules that meet on a token ---


def test_the_biases_of_a_token_are_one_rule_whatever_else_the_token_has():
    """So that a device may add rules in any order."""
    biases = [(3, 0.1), (4, 1.0), (3, 0.2), (3, 1e-9)]
    request = type("Request", (), {"token_ids": [1], "end_token_ids": {3}})
    request.params = SamplingParams(logit_bias=biases, min_tokens=2)
    words = rules_of(request, [[3], [8, 3], [9, 3]])
    number = words[0]
    _, added, tokens, *_ = words[1 : 1 + RULE_FIELDS * number].reshape(RULE_FIELDS, number)
    added = added.view("float32")
    by_token = {i: sorted(added[tokens == i].tolist()) for i in (3, 4)}
    ban = torch.tensor(BAN).item()
    assert by_token == {3: [ban] * 4 + [torch.tensor(0.1 + 0.2 + 1e-9).item()], 4: [1.0]}


# --- what is refused ---


@pytest.mark.parametrize(
    "value", ["none", "raw_logits", "processed_logits", "Raw", "", None, True, 1], ids=str
)
def test_another_mode_is_refused_by_name_and_value(folder, value):
    with pytest.raises(ValueError, match="logprobs_mode must be one of .'raw', 'processed'., got") as error:
        LLM(str(folder), logprobs_mode=value)
    assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_modes_have_the_names_of_vllm_too(folder, mode):
    with LLM(str(folder), **EXACT, num_kvcache_blocks=8, logprobs_mode=f"{mode}_logprobs") as llm:
        assert llm.config.logprobs_mode == mode
