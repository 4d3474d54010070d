"""What changes or narrows the choice of a token, against transformers' logits processors, and what is told.

Filters are compared by the set they keep and its probabilities, everything else by greedy tokens of the
engine, driven as on a CPU and as on a GPU, and by chi-squared where tokens are drawn.
"""

import asyncio
import functools
import json
import math
import random

import pytest
import torch
import transformers
from engines import assert_empty, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_settings import (
    MIXED,
    PROMPT,
    SCHEDULES,
    VOCAB,
    Only,
    Penalty,
    expected_logprobs,
    processors_of,
)
from sampling_checks import RANDOM_SEEDS, assert_follows
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.extensions.batch import __main__ as batch
from nanovllm.extensions.batch.lines import Answer
from nanovllm.extensions.logits import bias as biases
from nanovllm.extensions.logits.bias import BAN, BiasProcessor, rules_of
from nanovllm.extensions.logits.kernels import logit_edits
from nanovllm.extensions.logits.kernels.filtering import filter_thresholds_torch
from nanovllm.layers.sampler import Sampler, SamplingStep
from tiny_checkpoints import EXACT, load_reference, make_checkpoint, one_thread  # noqa: F401

FILTERS = [
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=400),
    dict(top_k=5000),
    dict(top_p=0.05),
    dict(top_p=0.9),
    dict(top_p=1 - 2**-13),
    dict(min_p=0.02),
    dict(min_p=1.0),
    dict(top_k=50, top_p=0.95),
    dict(top_k=20, top_p=0.5, min_p=0.1),
    dict(top_p=0.8, min_p=0.001),
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.0])
def test_filters_keep_what_transformers_keeps_with_the_same_probabilities(filters, temperature):
    params = SamplingParams(temperature, **filters)
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(0)) * 3
    expected = processors_of(params)(None, logits.double())  # whose sums would else lose the last tokens
    settings = torch.tensor([[params.top_k, params.top_p, params.min_p]]).expand(20, -1)
    thresholds = filter_thresholds_torch(logits, torch.full((20,), temperature), settings)
    scores = (logits / temperature).masked_fill(logits < thresholds[:, None], -math.inf)
    assert torch.equal(scores.isfinite(), expected.isfinite())
    torch.testing.assert_close(scores.softmax(-1).double(), expected.softmax(-1), rtol=0, atol=1e-5)
    step = SamplingStep(
        torch.arange(4000, dtype=torch.int32),
        torch.full((4000,), temperature),
        RANDOM_SEEDS[:4000],
        torch.zeros(4000, dtype=torch.int64),
        lowest=thresholds[:1].expand(4000),
    )
    tokens = Sampler()(logits[:1].expand(4000, -1), step)
    assert_follows(tokens, expected[0].softmax(-1))


def test_equal_logits_are_kept_or_left_out_together():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    for filters in ([2, 1, 0], [0, 0.6, 0]):
        assert filter_thresholds_torch(logits, torch.ones(1), torch.tensor([filters])).item() == 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, vocab_size=VOCAB, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def reference(folder):
    return load_reference(folder)


@pytest.fixture(scope="module")
def engine(folder):
    with LLM(str(folder), **EXACT, num_kvcache_blocks=60) as llm:
        yield llm


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def llm(request, engine, monkeypatch):
    """An engine, driven as on a CPU and as on a GPU, that must be empty after the test."""
    monkeypatch.setattr(engine, "_overlap", request.param)
    yield engine
    assert_empty(engine)


def biases_of(llm: LLM) -> BiasProcessor:
    return llm.parts.logits_processor("bias")


def generate(llm: LLM, prompt=PROMPT, **params) -> dict:
    params = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, **params}
    [result] = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    return result


def reference_tokens(reference, processors, count: int = 30) -> list[int]:
    """Greedy tokens of transformers after PROMPT, with its logits processors in that order."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(count):
            scores = reference(input_ids=ids).logits[:, -1]
            for processor in processors:
                scores = processor(ids, scores)
            ids = torch.cat((ids, scores.argmax(-1, keepdim=True)), 1)
    return ids[0, len(PROMPT) :].tolist()


EDITS = {
    "repetition": (
        dict(repetition_penalty=1.6),
        lambda: [transformers.RepetitionPenaltyLogitsProcessor(1.6)],
    ),
    "reward of repetition": (
        dict(repetition_penalty=0.8),
        lambda: [transformers.RepetitionPenaltyLogitsProcessor(0.8)],
    ),
    "presence": (dict(presence_penalty=1.5), lambda: [Penalty(1.5, 0)]),
    "frequency": (dict(frequency_penalty=0.7), lambda: [Penalty(0, 0.7)]),
    "negative": (dict(frequency_penalty=-0.4, presence_penalty=-1), lambda: [Penalty(-1, -0.4)]),
    "all penalties": (
        dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
        lambda: [transformers.RepetitionPenaltyLogitsProcessor(1.3), Penalty(0.5, 0.5)],
    ),
    "bias": (
        dict(logit_bias={7: 6.5, 30: -2.25, 31: 5.0}),
        lambda: [transformers.SequenceBiasLogitsProcessor([[[7], 6.5], [[30], -2.25], [[31], 5.0]])],
    ),
    "many biases": (
        dict(logit_bias={i: (i % 13) - 6.0 for i in range(VOCAB)}),
        lambda: [transformers.SequenceBiasLogitsProcessor([[[i], i % 13 - 6.0] for i in range(VOCAB)])],
    ),
    "allowed": (dict(allowed_token_ids=range(50, 90, 3)), lambda: [Only(list(range(50, 90, 3)))]),
    "all of it": (
        dict(
            logit_bias={60: 3.0, 61: -4.5},
            allowed_token_ids={*range(50, 200)},
            repetition_penalty=1.2,
            frequency_penalty=0.3,
        ),
        lambda: [
            transformers.SequenceBiasLogitsProcessor([[[60], 3.0], [[61], -4.5]]),
            Only(list(range(50, 200))),
            transformers.RepetitionPenaltyLogitsProcessor(1.2),
            Penalty(0, 0.3),
        ],
    ),
}


@functools.cache
def tokens_under(reference, name: str) -> list[int]:
    return reference_tokens(reference, EDITS[name][1]())


@pytest.mark.parametrize("name", EDITS)
def test_greedy_tokens_under_edits_are_those_of_transformers(llm, reference, name):
    params, _ = EDITS[name]
    params = {key: list(value) if isinstance(value, range) else value for key, value in params.items()}
    token_ids = generate(llm, **params)["token_ids"]
    assert token_ids == tokens_under(reference, name)
    assert token_ids != generate(llm)["token_ids"]


def test_words_that_are_banned_do_not_come(llm, reference, monkeypatch):
    free = generate(llm)["token_ids"]
    words = [free[3:4], free[6:8], free[10:14]]
    monkeypatch.setattr(biases_of(llm), "bad_words", lambda params: words if params.bad_words else [])
    token_ids = generate(llm, bad_words=["stands for these"])["token_ids"]
    assert token_ids == reference_tokens(
        reference, [transformers.NoBadWordsLogitsProcessor(words, eos_token_id=-1)]
    )
    for word in words:
        assert not any(token_ids[i : i + len(word)] == word for i in range(30))


def test_a_banned_word_counts_from_the_completion_on(llm, monkeypatch):
    free = generate(llm)["token_ids"]
    monkeypatch.setattr(biases_of(llm), "bad_words", lambda _: [[PROMPT[-1], free[0]]])
    assert generate(llm, bad_words=["stands for these"])["token_ids"] == free


def test_banned_words_are_banned_with_and_without_a_space_before_them(engine):
    params = SamplingParams(bad_words=["ab", " c"])
    words = [engine.decode(word) for word in biases_of(engine).bad_words(params)]
    assert words == ["ab", " ab", "c", " c"]


@pytest.mark.parametrize("min_tokens", [1, 4, 11, 30])
def test_nothing_ends_a_completion_before_its_fewest_tokens(llm, reference, monkeypatch, min_tokens):
    free = generate(llm)["token_ids"]
    ends = [free[2], free[8]]
    token_ids = generate(llm, stop_token_ids=ends, min_tokens=min_tokens)["token_ids"]
    late = transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, ends, device="cpu")
    expected = reference_tokens(reference, [late])
    place = next((i for i, token_id in enumerate(expected) if token_id in ends), 29)
    assert token_ids == expected[: place + 1] and len(token_ids) >= min_tokens
    monkeypatch.setattr(llm.prompts, "eos", frozenset(ends))
    assert generate(llm, ignore_eos=False, min_tokens=min_tokens)["token_ids"] == token_ids


def test_a_stop_text_does_not_count_before_the_fewest_tokens(llm, monkeypatch):
    coming = iter(llm.encode("stop, stop, stop" * 2))
    logits = torch.eye(VOCAB)
    monkeypatch.setattr(llm.model_runner.model, "compute_logits", lambda _: logits[[next(coming)]])
    result = generate(llm, max_tokens=20, min_tokens=9, stop="stop")
    assert result["text"] == "stop, " and len(result["token_ids"]) == 10


DRAWN = {
    "top_k": dict(top_k=9),
    "top_p": dict(top_p=0.7),
    "min_p": dict(min_p=0.05),
    "both": dict(top_k=30, top_p=0.8),
    "with a bias": dict(top_p=0.9, logit_bias={3: 4.0, 4: -50}),
    "with a penalty": dict(top_k=40, repetition_penalty=1.5),
    "allowed": dict(allowed_token_ids=[3, 5, 8, 13]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_tokens_follow_the_distribution_of_transformers(engine, reference, name):
    params = SamplingParams(0.8, 1, True, **DRAWN[name])
    with torch.no_grad():
        scores = reference(input_ids=torch.tensor([PROMPT])).logits[:, -1]
    for token_id, bias in params.logit_bias:
        scores[0, token_id] += bias
    if params.repetition_penalty != 1:
        scores = transformers.RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([PROMPT]), scores)
    if params.allowed_token_ids:
        scores = Only(params.allowed_token_ids)(None, scores)
    probabilities = processors_of(params)(None, scores).softmax(-1)[0]
    results = engine.generate([PROMPT] * 1000, params, use_tqdm=False)
    assert_follows(torch.tensor(tokens_of(results)), probabilities)


def run_mixed(folder, overlap: bool, **options) -> list[dict]:
    """Every kind of request in one batch, each with a seed of its own."""
    params = [SamplingParams(**{"max_tokens": 40, "seed": i, **kind}) for i, kind in enumerate(MIXED)]
    prompts = [[i, *PROMPT] for i in range(len(MIXED))]
    with LLM(str(folder), **EXACT, **{"num_kvcache_blocks": 100, **options}) as llm:
        llm._overlap = overlap
        results = llm.generate(prompts, params, use_tqdm=False)
        assert_empty(llm)
        assert (llm.stats()["num_preemptions"] > 0) == ("num_kvcache_blocks" in options)
    return [{key: result[key] for key in ("token_ids", "text", "finish_reason")} for result in results]


@pytest.fixture(scope="module")
def mixed(folder):
    return run_mixed(folder, False)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.usefixtures("no_forecast")
def test_a_request_gets_its_tokens_in_any_company_and_schedule(folder, mixed, name):
    assert run_mixed(folder, True, **SCHEDULES[name]) == mixed


def test_rows_are_clean_for_those_who_come_after(engine):
    """Each running sequence has a row of settings, which the next one in it must not inherit."""
    plain = SamplingParams(1.0, 20, True, seed=4)
    [expected] = engine.generate([PROMPT], plain, use_tqdm=False)
    for kind in MIXED:
        generate(engine, **{"temperature": 1.0, **kind})
        others = [SamplingParams(1.0, 20, True, top_k=2, frequency_penalty=1.0, logit_bias={1: 5.0})] * 2
        results = engine.generate([PROMPT] * 3, [plain, *others], use_tqdm=False)
        assert tokens_of(results[:1]) == tokens_of([expected])


# --- memory ---


class Copies(TorchDispatchMode):
    """Counts those of a tensor's shape."""

    def __init__(self, shape: torch.Size):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        is_copy = func.overloadpacket.__name__ in ("clone", "_to_copy", "to")
        self.count += is_copy and result.shape == self.shape
        return result


@pytest.mark.parametrize(
    "names, count",
    [
        ("filters logprobs", 0),
        ("logprobs scores", 0),
        ("bitmask", 0),
        ("bitmask logprobs", 1),
        ("bias penalties", 1),
        ("bias logprobs", 1),
        ("bias penalties bitmask filters logprobs scores", 1),
    ],
)
def test_logits_are_copied_at_most_once_and_only_where_somebody_changes_them(
    engine, monkeypatch, names, count
):
    """At the largest batch and vocabulary a copy takes hundreds of megabytes, which the KV cache lacks."""
    monkeypatch.setattr(Sampler, "forward", lambda *_: torch.zeros(3, dtype=torch.int64))
    wanted = [each for each in engine.parts.logits_processors if each.name in names.split()]
    for processor in wanted:
        monkeypatch.setattr(processor, "drawn", lambda *_: None)
    logits = torch.zeros(3, VOCAB, dtype=torch.bfloat16)
    slots = torch.arange(3, dtype=torch.int32)
    with Copies(logits.shape) as copies:
        step = SamplingStep(slots, slots.float(), slots.long(), slots, wanted)
        engine.model_runner.sample_logits(logits, step)
    assert copies.count == count


# --- properties ---

some_logits = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(some_logits, st.floats(0.05, 5), st.integers(0, 2**63 - 1), st.integers(0, 5000))
def test_the_best_token_alone_is_greedy_and_no_filter_changes_nothing(logits, temperature, seed, position):
    logits = torch.tensor([logits])
    numbers = [torch.tensor([temperature]), torch.tensor([seed]), torch.tensor([position])]

    def draw(lowest: torch.Tensor | None = None) -> torch.Tensor:
        step = SamplingStep(torch.zeros(1, dtype=torch.int32), *numbers, lowest=lowest)
        return Sampler()(logits, step)

    best = filter_thresholds_torch(logits, numbers[0], torch.tensor([[1.0, 1.0, 0.0]]))
    assert best.item() == logits.max().item()
    assert logits[0, draw(best)].item() == logits.max().item()
    for nothing in ([0.0, 1.0, 0.0], [len(logits[0]), 1.0, 0.0]):
        thresholds = filter_thresholds_torch(logits, numbers[0], torch.tensor([nothing]))
        assert torch.equal(draw(thresholds), draw())


@settings(max_examples=100, deadline=None)
@given(
    some_logits,
    st.floats(0.05, 5),
    st.integers(0, 50),
    st.floats(0.01, 1, exclude_max=True),
    st.floats(0, 1),
)
def test_what_filters_keep_is_the_best_and_no_more_than_each_allows(logits, temperature, top_k, top_p, min_p):
    logits, filters = torch.tensor([logits]), torch.tensor([[top_k, top_p, min_p]])
    threshold = filter_thresholds_torch(logits, torch.tensor([temperature]), filters)
    kept = logits[0] >= threshold
    probabilities = (logits[0].double() / temperature).softmax(-1)
    assert kept.any() and kept[logits[0].argmax()]
    if top_k:
        assert (logits[0] > threshold).sum() < top_k
    assert probabilities[logits[0] > threshold].sum() < top_p + 1e-6
    assert (probabilities[kept] >= min_p * probabilities.max() * (1 - 1e-5)).all()


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=30), st.integers(0, 1000), st.floats(0, 3))
def test_tokens_that_are_not_allowed_are_never_seen(engine, allowed, seed, temperature):
    result = generate(engine, temperature=temperature, seed=seed, allowed_token_ids=allowed, max_tokens=12)
    assert set(result["token_ids"]) <= allowed


# --- rules: any number of any length, and nobody else pays for them ---

LONG_WORD = "x" * 450
SHORT_WORDS = [chr(a) + chr(b) for a in range(33, 97) for b in range(33, 97)][:4000]


def best_tokens(logits: list[float], words: list[list[int]], params: SamplingParams) -> list[int]:
    """What the rules leave of a model that always has these logits."""
    done: list[int] = []
    while len(done) < params.max_tokens and not set(done[-1:]) & set(params.stop_token_ids):
        scores = list(logits)
        for token_id, bias in params.logit_bias:
            scores[token_id] += bias
        for *before, token_id in words:
            if done[max(0, len(done) - len(before)) :] == before:
                scores[token_id] += BAN
        if len(done) < params.min_tokens:
            for token_id in params.stop_token_ids:
                scores[token_id] += BAN
        done.append(scores.index(max(scores)))
    return done


def random_word(pick: random.Random) -> list[int]:
    """Something over and over, as what it is to keep away does as well."""
    part = [pick.randrange(4) for _ in range(pick.randint(1, 4))]
    return (part * 16)[: pick.randint(2, pick.choice([3, 16]))]


@pytest.mark.parametrize("name", SCHEDULES)
def test_rules_of_any_shape_leave_what_plain_arithmetic_leaves(folder, monkeypatch, name):
    for module in (biases, logit_edits):
        monkeypatch.setattr(module, "HISTORY", 16)  # fewer than there are tokens to draw
    pick, words, params = random.Random(0), {}, []
    for i in range(12):
        words[f"{i}",] = [random_word(pick) for _ in range(pick.choice([0, 5, 60, 200]))]
        bias = [(pick.randrange(8), pick.randint(-4, 4) / 8) for _ in range(pick.choice([0, 3]))]
        ends = dict(min_tokens=pick.choice([0, 5, 30]), stop_token_ids=pick.choice([[], [pick.randrange(6)]]))
        params.append(SamplingParams(0, 40, True, logit_bias=bias, bad_words=[f"{i}"], **ends))
    logits = [5 - i / 8 for i in range(VOCAB)]
    with LLM(str(folder), **EXACT, **{"num_kvcache_blocks": 100, **SCHEDULES[name]}) as llm:
        llm._overlap = True
        always, apply = torch.tensor(logits), biases_of(llm).apply
        monkeypatch.setattr(
            biases_of(llm), "apply", lambda x, step: apply(always.expand(len(x), -1).clone(), step)
        )
        monkeypatch.setattr(biases_of(llm), "bad_words", lambda params: words[params.bad_words])
        prompts = [[i, *PROMPT[: 3 * i + 1]] for i in range(len(params))]
        results = llm.generate(prompts, params, use_tqdm=False)
    expected = [best_tokens(logits, words[one.bad_words], one) for one in params]
    assert tokens_of(results) == expected
    assert sum(len(set(tokens)) > 2 for tokens in expected) > 3, "too easy"


@pytest.mark.parametrize("name", [*EDITS, "a word"])
def test_a_preempted_request_goes_on_as_if_nothing_had_been(engine, monkeypatch, name):
    """Preempted after 13 tokens, among them the first two of a word that is banned."""
    params = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    if name == "a word":
        word = generate(engine)["token_ids"][11:14]
        monkeypatch.setattr(biases_of(engine), "bad_words", lambda _: [word])
        params["bad_words"] = ["stands for it"]
    else:
        params |= {
            key: list(value) if isinstance(value, range) else value for key, value in EDITS[name][0].items()
        }
    engine.add_request(PROMPT, SamplingParams(**params))
    for _ in range(13):
        engine.step()
    [seq] = engine.scheduler.running
    assert seq.num_completion_tokens == 13
    engine.scheduler.preempt(engine.scheduler.running[-1])
    while not (finished := engine.step()[0]):
        pass
    expected = generate(engine, **params)["token_ids"]
    assert finished == [(seq.seq_id, expected)] and expected != generate(engine)["token_ids"]


class Rows:
    """Both halves, for four sequences."""

    def __init__(self):
        self.table = BiasProcessor()
        self.table.allocate(4, 50, torch.device("cpu"))

    def begin(self, row: int, words: list[list[int]] = (), **params) -> Sequence:
        """Give the row to a new sequence."""
        params["bad_words"] = ["stands for these"] if words else ()
        seq = Sequence(Request([1, 2], SamplingParams(**params)))
        seq.slot = row
        if self.table.wants(seq.sampling_params):
            seq.request.own["bias"] = rules_of(seq.request, words)
        self.table.receive(self.table.prepare([seq]))
        return seq


def test_the_rules_of_a_row_are_its_own_and_go_with_its_sequence():
    both = Rows()
    table, begin = both.table, both.begin

    def step(row: int, position: int) -> SamplingStep:
        numbers = torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.tensor([position])
        return SamplingStep(torch.tensor([row], dtype=torch.int32), *numbers)

    def shaped(row: int) -> torch.Tensor:
        return table.apply(torch.zeros(1, 50), step(row, 4))[0]

    def sizes() -> dict[int, int]:
        return {row: rules.untyped_storage().nbytes() // 4 for row, rules in table.rules.items()}

    first = begin(0, [[3, 4, 5], [7]], logit_bias={9: 2.0})
    for position, token_id in ((2, 3), (3, 4)):
        table.drawn(torch.zeros(1, 50), torch.tensor([token_id]), step(0, position))
    expected = torch.zeros(50)
    expected[[5, 7]], expected[9] = BAN, 2.0
    assert torch.equal(shaped(0), expected)
    other = begin(1, [[*range(20)], *([i] for i in range(30, 40))], logit_bias={i: 1.0 for i in range(20)})
    assert torch.equal(shaped(0), expected)
    assert (shaped(1)[30:40] == BAN).all() and torch.equal(shaped(1)[:20], torch.ones(20))
    assert (
        sizes()
        == {seq.slot: len(seq.request.own["bias"]) for seq in (first, other)}
        == {0: 1 + 3 * 5 + 2, 1: 1 + 31 * 5 + 19}
    )
    first.slot = -1
    another = begin(0, [[3, 4, 5]])
    assert not shaped(0).any(), "what an earlier sequence drew in this row counts for the next"
    other.slot = -1
    last = begin(2, [[1]])
    assert sizes() == {another.slot: 1 + 5 + 2, last.slot: 1 + 5}, (
        "the rules of a sequence that has ended are kept"
    )
    assert [table.addresses[row] for row in (0, 2)] == [table.rules[row].data_ptr() for row in (0, 2)]
    another.slot = -1
    begin(0)
    assert list(sizes()) == [2] and table.addresses[0] == 0 and not shaped(0).any()
    table.reset()
    assert not sizes() and not table.addresses.any() and not shaped(2).any()


class Costs:
    """Notes how many bytes an engine's rows have on the device, are sent and are gone through."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch):
        self.slots, self.table = llm.model_runner.slots, biases_of(llm)
        self.most, self.sent, self.read = 0, [], []
        receive, apply_rules = self.table.receive, logit_edits.apply_rules

        def noted_message(message):
            _, rules, history = message
            self.sent.append(sum(array.nbytes for array in [*rules.values(), history]))
            receive(message)
            self.most = max(self.most, self.on_device())

        def noted_rules(logits, rows, positions, rules, *args):
            self.read.append(sum(rules[row].nbytes for row in rows.tolist() if row in rules))
            apply_rules(logits, rows, positions, rules, *args)

        monkeypatch.setitem(llm.model_runner.receivers, "bias", noted_message)
        monkeypatch.setattr(biases, "apply_rules", noted_rules)

    def on_device(self) -> int:
        tables = [self.slots.buffer, self.table.history, self.table.addresses]
        return sum(x.untyped_storage().nbytes() for x in [*tables, *self.table.rules.values()])


def test_rules_take_no_more_memory_than_each_request_asks_for(folder, monkeypatch):
    """However many one has, and however long another one's are."""
    params = [SamplingParams(0, 5, True, bad_words=words) for words in ([LONG_WORD], SHORT_WORDS)]
    params += [SamplingParams(0, 5, True, min_tokens=1, stop_token_ids=[3])] * 2
    with LLM(str(folder), **EXACT, num_kvcache_blocks=60, max_num_seqs=4) as llm:
        costs = Costs(llm, monkeypatch)
        before = costs.on_device()
        expected = tokens_of(llm.generate([PROMPT] * 4, [SamplingParams(0, 5, True)] * 4, use_tqdm=False))
        results = llm.generate([PROMPT] * 4, params, use_tqdm=False)
        assert tokens_of(results[:1] + results[2:]) == expected[:3]
        words = [len(llm.prompts.read(PROMPT, one).own["bias"]) for one in params]
        assert max(words) == words[1] < 7 * 2 * 4000
        assert costs.most - before == 4 * sum(words)


def test_what_a_request_costs_does_not_depend_on_those_before_it(folder, monkeypatch):
    small = dict(min_tokens=1, stop_token_ids=[3])
    with LLM(str(folder), **EXACT, num_kvcache_blocks=60, max_num_seqs=4) as llm:
        costs = Costs(llm, monkeypatch)
        generate(llm, **small)
        expected = costs.on_device(), list(costs.sent), list(costs.read)
        generate(llm, bad_words=[*SHORT_WORDS[:500], LONG_WORD[:200]])
        costs.sent.clear()
        costs.read.clear()
        generate(llm, **small)
        assert (costs.on_device(), costs.sent, costs.read) == expected


def test_rules_that_do_not_fit_together_wait_for_each_other(folder, monkeypatch):
    monkeypatch.setattr(biases, "RULE_WORDS", 300)
    sizes = [(30, 8), (5, 30), (40, 8), (59, 8), (1, 8)]  # and how many tokens are to come
    params = [SamplingParams(0, k, True, logit_bias={i: 1.0 for i in range(n)}) for n, k in sizes]
    with LLM(str(folder), **EXACT, num_kvcache_blocks=100) as llm:
        costs = Costs(llm, monkeypatch)
        before = costs.on_device()
        results = llm.generate([PROMPT] * 6, [*params, SamplingParams(0, 8, True)], use_tqdm=False)
        assert costs.most - before < 4 * 300
        alone = [llm.generate([PROMPT], one, use_tqdm=False)[0]["token_ids"] for one in params]
        assert tokens_of(results) == [*alone, generate(llm, max_tokens=8)["token_ids"]]
        assert_empty(llm)


def test_rules_that_can_never_fit_fail_their_own_request_alone(folder, monkeypatch):
    monkeypatch.setattr(biases, "RULE_WORDS", 3000)
    too_many = dict(bad_words=["a", *SHORT_WORDS[:300]], logit_bias={7: 1.0})
    complaint = (
        "bad_words of 1,503 tokens and logit_bias of 1 take 15,668 bytes of the device's memory, of which "
        "all requests together may have 12,000"
    )
    options = dict(**EXACT, num_kvcache_blocks=60)
    with LLM(str(folder), **options) as llm:
        expected = generate(llm, "x", max_tokens=5)
        with pytest.raises(ValueError, match=complaint):
            generate(llm, **too_many)
        with pytest.MonkeyPatch.context() as patch:  # all there is may be taken by one
            size = llm.prompts.read("x", SamplingParams(bad_words=["abc"])).own["bias"].size
            patch.setattr(biases, "RULE_WORDS", size)
            generate(llm, bad_words=["abc"], max_tokens=1)
            patch.setattr(biases, "RULE_WORDS", size - 1)
            with pytest.raises(ValueError, match="bad_words of 7 tokens"):
                generate(llm, bad_words=["abc"], max_tokens=1)
        generate(llm, bad_words=["y" * 1023], max_tokens=1)
        with pytest.raises(ValueError, match=r"each of bad_words must have at most 1024 tokens, got 1025"):
            generate(llm, bad_words=["y" * 1024])
        answers: list[Answer] = []
        plain = dict(prompt="x", temperature=0, max_tokens=5, ignore_eos=True)
        lines = [plain, {**plain, **too_many}, plain]
        batch.run(llm, ((i, json.dumps(x).encode()) for i, x in enumerate(lines)), answers.append, {})
    texts = [json.loads(answer.text) for answer in sorted(answers, key=lambda answer: answer.line)]
    assert complaint in texts[1]["error"]["message"]
    assert texts[0]["text"] == texts[2]["text"] == expected["text"]

    async def run(engine: AsyncLLM) -> list:
        params = [SamplingParams(0, 5, True, **kind) for kind in ({}, too_many, {})]
        return await asyncio.gather(*(engine.generate("x", one) for one in params), return_exceptions=True)

    with AsyncLLM(str(folder), **options) as engine:
        first, second, third = asyncio.run(run(engine))
    assert isinstance(second, ValueError) and complaint in str(second)
    assert first["text"] == third["text"] == expected["text"]


# --- the edges of what there is ---


@pytest.mark.parametrize("temperature", [0, 1.0, 1e39])
def test_what_is_allowed_comes_first_even_if_all_of_it_is_banned(llm, temperature):
    [a] = llm.encode("a")
    params = dict(allowed_token_ids=[a], temperature=temperature, max_tokens=5)
    assert generate(llm, **params, bad_words=["aa"])["token_ids"] == [a] * 5
    assert generate(llm, **params, bad_words=["a"])["token_ids"] == [a] * 5
    with pytest.raises(ValueError, match="min_tokens=3 is not reached: each of allowed_token_ids"):
        generate(llm, allowed_token_ids=[a, 256], stop_token_ids=[a, 256], min_tokens=3)


@pytest.mark.parametrize("top_p", [1e-46, 1e-300])
def test_the_smallest_share_there_is_is_that_of_the_best_token(llm, top_p):
    greedy = generate(llm)["token_ids"]
    assert generate(llm, temperature=1.0, top_p=top_p)["token_ids"] == greedy


def test_a_word_of_tokens_that_the_model_never_draws_bans_nothing(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3", seed=1, vocab_size=200)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=60) as llm:
        assert max(llm.tokenizer.encode("à", add_special_tokens=False)) >= 200
        assert generate(llm, bad_words=["à"])["token_ids"] == generate(llm)["token_ids"]


def test_filters_do_not_depend_on_the_default_dtype(engine):
    params = dict(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, seed=1)
    expected = generate(engine, **params)["token_ids"]
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert generate(engine, **params)["token_ids"] == expected
    finally:
        torch.set_default_dtype(torch.float32)


# --- log-probabilities ---


def assert_logprobs(found, token_ids, expected, count: int, tokenizer) -> None:
    """What is told of each token, and of the likeliest ones, is what transformers computes."""
    assert len(found) == len(token_ids) == len(expected)
    for entries, token_id, row in zip(found, token_ids, expected, strict=True):
        top = row.topk(max(count, 1)).indices[:count].tolist()
        assert set(entries) == {token_id, *top}
        for i, entry in entries.items():
            assert entry.logprob == pytest.approx(row[i].item(), abs=1e-4)
            assert entry.rank == (row > row[i]).sum().item() + 1
            assert entry.decoded_token == tokenizer.decode([i])


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities_are_those_of_transformers(llm, reference, count, temperature):
    """Of the model itself: what changes the choice does not change what is told."""
    result = generate(llm, temperature=temperature, logprobs=count, frequency_penalty=0.5, top_k=30)
    token_ids = result["token_ids"]
    expected = expected_logprobs(reference, PROMPT + token_ids)[len(PROMPT) - 1 : -1]
    assert_logprobs(result["logprobs"], token_ids, expected, count, llm.tokenizer)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.usefixtures("no_forecast")
def test_log_probabilities_of_prompts_are_those_of_transformers(folder, reference, name):
    """Also where the KV cache has the prompt already, and when it is computed again after a preemption."""
    prompts = [PROMPT, [7, 7], [3], [*PROMPT, *range(30)], PROMPT]
    params = [SamplingParams(0, 30, True, prompt_logprobs=i, logprobs=0) for i in range(5)]
    with LLM(str(folder), **EXACT, **{"num_kvcache_blocks": 60, **SCHEDULES[name]}) as llm:
        llm._overlap = True
        plain = llm.generate(prompts, SamplingParams(0, 30, True), use_tqdm=False)
        results = llm.generate(prompts, params, use_tqdm=False)
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            first, *found = result["prompt_logprobs"]
            assert first is None
            assert_logprobs(found, prompt[1:], expected_logprobs(reference, prompt)[:-1], i, llm.tokenizer)
            assert len(result["logprobs"]) == 30
        assert tokens_of(results) == tokens_of(plain)
        assert all(result["num_cached_tokens"] == 0 for result in results)
        assert_empty(llm)


def test_results_have_log_probabilities_only_where_they_were_asked_for(llm):
    params = [
        SamplingParams(0, 3, True),
        SamplingParams(0, 4, True, logprobs=1, n=2),
        SamplingParams(0, 2, True, prompt_logprobs=0, n=2),
    ]
    plain, told, scored = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert not {"logprobs", "prompt_logprobs"} & set(plain)
    assert "prompt_logprobs" not in told and [len(o["logprobs"]) for o in told["outputs"]] == [4, 4]
    assert "logprobs" not in scored and len(scored["prompt_logprobs"]) == len(PROMPT)


def test_scores_are_the_log_likelihood_that_transformers_finds(llm, reference):
    texts = ["A rose is a rose.", [5], PROMPT, [3] * 512]
    results = llm.score(texts, use_tqdm=False)
    for text, result in zip(texts, results, strict=True):
        token_ids = llm.encode(text) if isinstance(text, str) else text
        logprobs = expected_logprobs(reference, token_ids)[:-1]
        logprobs = logprobs.gather(1, torch.tensor([token_ids[1:]]).T)[:, 0]
        assert result["token_ids"] == token_ids and result["token_logprobs"][0] is None
        assert result["token_logprobs"][1:] == pytest.approx(logprobs.tolist(), abs=1e-4)
        assert result["logprob"] == pytest.approx(logprobs.sum().item(), abs=2e-4 * len(token_ids))
    assert llm.score(texts[0], use_tqdm=False) == results[:1]
    with pytest.raises(ValueError, match=r"prompts\[1\].*513"):
        llm.score([[1], [1] * 513])


# --- what is refused ---

BAD = {
    "top_p": [0, -0.1, 1.01, math.nan, "1", True, None],
    "top_k": [-2, 1.5, "5", True, None, 2**40],
    "min_p": [-0.1, 1.1, math.nan, None],
    "min_tokens": [-1, 65, 1.0, True],
    "logprobs": [-1, 21, 1.5, True, "all"],
    "prompt_logprobs": [-1, 21, 1.5, True],
    "presence_penalty": [-2.1, 2.1, math.nan, None],
    "frequency_penalty": [-2.1, 2.1, math.inf, "1"],
    "repetition_penalty": [0, -1.0, math.nan, math.inf, 10**400, None],
    "logit_bias": [{"a": 1}, {-1: 1.0}, {1: 101}, {1: math.nan}, {1: None}, [1, 2], 5, "x"],
    "allowed_token_ids": [[], [-1], [1.5], 5, "abc", [True]],
    "bad_words": ["abc", [""], [1], 5],
}


@pytest.mark.parametrize("name, value", [(name, value) for name in BAD for value in BAD[name]], ids=str)
def test_a_bad_option_is_refused_by_name_and_value(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(f"{name} must be ") and str(error.value).endswith(f"got {value!r}")


def test_token_ids_beyond_the_vocabulary_are_refused(llm):
    for params in (dict(allowed_token_ids=[1, VOCAB]), dict(logit_bias={VOCAB: 1.0})):
        with pytest.raises(ValueError, match=rf"prompts\[0\].*{next(iter(params))}.*0 to 256, got 257"):
            generate(llm, **params)


def test_bad_words_need_a_tokenizer(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=20) as llm:
        with pytest.raises(ValueError, match="bad_words=.*no tokenizer"):
            generate(llm, bad_words=["x"])
        result = generate(llm, logprobs=1, max_tokens=2)
        assert {entry.decoded_token for entries in result["logprobs"] for entry in entries.values()} == {None}


def test_params_of_every_kind_are_hashable_and_equal_however_they_were_given():
    one = SamplingParams(logit_bias={1: 2}, allowed_token_ids=[3], bad_words=["a"])
    other = SamplingParams(logit_bias=((1, 2.0),), allowed_token_ids={3}, bad_words=("a",))
    assert one == other and hash(one) == hash(other)
    assert SamplingParams(logit_bias=None, bad_words=None) == SamplingParams()


# --- recommended parameters ---


@pytest.mark.parametrize(
    "recommended, expected",
    [
        (None, {}),
        ({"eos_token_id": 5}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 9},
            dict(temperature=0.6, top_k=20, top_p=0.95, max_tokens=9),
        ),
        ({"do_sample": False, "repetition_penalty": 1.05}, dict(temperature=0.0, repetition_penalty=1.05)),
        ({"min_p": 0.1, "top_k": None}, dict(min_p=0.1)),
    ],
)
def test_recommended_parameters_come_from_the_checkpoint(tmp_path, recommended, expected):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if recommended is not None:
        (folder / "generation_config.json").write_text(json.dumps(recommended))
    with LLM(str(folder), **EXACT, num_kvcache_blocks=20) as llm:
        assert llm.default_sampling_params() == SamplingParams(**expected)


def test_a_bad_recommendation_is_an_error_that_names_it(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with LLM(str(folder), **EXACT, num_kvcache_blocks=20) as llm:
        with pytest.raises(ValueError, match="generation_config.json.*top_p.*7"):
            llm.default_sampling_params()
