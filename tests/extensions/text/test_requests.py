"""What a request may ask for and what it is told: seed, completions, stop texts and tokens, results."""

import itertools
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from engines import assert_empty, observer_of, tokens_of
from fuzz import CHECKPOINT, Question, answer_at_once, fuzz, rounding_explains
from tokenizers import Tokenizer, decoders, models

from nanovllm import LLM, SamplingParams
from nanovllm.engine import llm_engine
from nanovllm.extensions.logits import logprobs
from nanovllm.extensions.text.results import make_result
from nanovllm.extensions.text.stop_texts import StopTexts
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

PROMPT = [*range(40)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, vocab_size=257, num_hidden_layers=1
    )
    with LLM(str(folder), **EXACT, num_kvcache_blocks=60) as llm:
        yield llm


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def llm(request, engine, monkeypatch):
    """An engine, driven as on a CPU and as on a GPU, that must be empty after the test."""
    monkeypatch.setattr(engine, "_overlap", request.param)
    yield engine
    assert_empty(engine)
    assert not observer_of(engine, StopTexts).texts


def generate(llm: LLM, **params) -> dict:
    [result] = llm.generate([PROMPT], SamplingParams(ignore_eos=True, **params), use_tqdm=False)
    return result


def first_of(token_ids: list[int], beyond: int) -> int:
    """The place of a token, after so many, that does not occur before."""
    return next(i for i in range(beyond, len(token_ids)) if token_ids[i] not in token_ids[:i])


def test_a_result_says_why_it_ended_and_what_was_cached(llm):
    llm.scheduler.clear()  # forgets what the cache holds
    result = generate(llm, temperature=0, max_tokens=20)
    assert result["finish_reason"] == "length" and result["stop_reason"] is None
    assert result["num_prompt_tokens"] == 40 and result["num_cached_tokens"] == 0
    assert generate(llm, temperature=0, max_tokens=20) == {**result, "num_cached_tokens": 39}
    assert "outputs" not in result


def test_an_end_of_sequence_token_is_a_stop_without_a_reason(llm, monkeypatch):
    free = generate(llm, temperature=0, max_tokens=20)["token_ids"]
    place = first_of(free, 3)
    monkeypatch.setattr(llm.prompts, "eos", frozenset({free[place]}))
    [result] = llm.generate([PROMPT], SamplingParams(0, 20), use_tqdm=False)
    assert result["token_ids"] == free[: place + 1]
    assert result["finish_reason"] == "stop" and result["stop_reason"] is None
    for included, last in ((False, place), (True, place + 1)):
        params = SamplingParams(0, 20, include_stop_str_in_output=included, skip_special_tokens=False)
        [result] = llm.generate([PROMPT], params, use_tqdm=False)
        assert result["text"] == llm.tokenizer.decode(free[:last])


@pytest.mark.parametrize("max_tokens", [20, None], ids=["", "at the last token allowed"])
def test_a_stop_token_ends_the_completion_and_is_left_out_of_the_text(llm, max_tokens):
    free = generate(llm, temperature=0, max_tokens=20)["token_ids"]
    place = first_of(free, 4)
    stop = dict(temperature=0, max_tokens=max_tokens or place + 1, stop_token_ids=[free[place], 256])
    result = generate(llm, **stop)
    assert result["token_ids"] == free[: place + 1]
    assert result["finish_reason"] == "stop" and result["stop_reason"] == free[place]
    assert result["text"] == llm.tokenizer.decode(free[:place])
    assert generate(llm, **stop, include_stop_str_in_output=True)["text"] == llm.tokenizer.decode(
        free[: place + 1]
    )


TEXT = "One, zwölf, 二十! 👍 Done."


@pytest.fixture
def says(llm, monkeypatch):
    """Makes the model say a text, a byte a token, whatever it is asked."""

    def says(text: str) -> list[int]:
        token_ids = llm.tokenizer.encode(text)
        coming = iter(token_ids)
        monkeypatch.setattr(
            llm.model_runner.model, "compute_logits", lambda _: torch.eye(257)[[next(coming, 0)]]
        )
        return token_ids

    return says


@pytest.mark.parametrize("stop", ["O", "ne, z", "ö", "二十", "👍", "! 👍 D", "Done.", "."])
@pytest.mark.parametrize("last", [False, True], ids=["", "at the last token allowed"])
def test_a_stop_text_ends_the_completion_at_the_token_that_completes_it(llm, says, stop, last):
    end = TEXT.index(stop) + len(stop)
    token_ids = says(TEXT)[: len(TEXT[:end].encode())]
    params = dict(max_tokens=len(token_ids) if last else 60, stop=["never seen", stop])
    result = generate(llm, temperature=0, **params)
    assert result["text"] == TEXT[: end - len(stop)]
    assert result["token_ids"] == token_ids
    assert result["finish_reason"] == "stop" and result["stop_reason"] == stop
    says(TEXT)
    assert generate(llm, temperature=0, **params, include_stop_str_in_output=True)["text"] == TEXT[:end]


def test_a_stop_text_before_min_tokens_does_not_count_after_a_step_that_failed_either(llm, says):
    def failing():
        monkeypatch.undo()
        raise MemoryError

    says(TEXT)
    llm.add_request(PROMPT, SamplingParams(0, 15, True, stop="One", min_tokens=8))
    [seq] = llm.unfinished.values()
    while seq.num_completion_tokens < 11:
        llm.step()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(llm.scheduler, "schedule", failing)
        with pytest.raises(MemoryError):
            llm.step()
    while not llm.is_finished():
        llm.step()
    assert (seq.finish_reason, seq.num_completion_tokens) == ("length", 15)


def test_a_stop_text_that_a_failed_step_has_found_is_forgotten_with_its_last_token(llm, says):
    says(TEXT)
    request_id = llm.add_request(PROMPT, SamplingParams(0, 15, True, stop=", z"))
    seq = llm.unfinished[request_id]

    def fail(*args):
        llm.scheduler.end(*args)
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "end", fail)
        with pytest.raises(MemoryError):
            while True:
                llm.step()
    llm.abort(request_id)
    llm.step()
    result = make_result(llm.tokenizer, [seq])
    assert (result["text"], result["finish_reason"], result["stop_reason"]) == ("One, ", "abort", None)


@pytest.mark.parametrize("stop, min_tokens, count", [("One", 3, 3), ("One", 4, 9), ("One, z", 4, 6)])
def test_a_stop_text_counts_from_the_token_on_that_makes_min_tokens(llm, says, stop, min_tokens, count):
    """A character a token: completed by that token, by the one before it, and begun before it."""
    says(TEXT)
    result = generate(llm, temperature=0, max_tokens=9, stop=stop, min_tokens=min_tokens)
    assert len(result["token_ids"]) == count
    assert (result["finish_reason"], result["stop_reason"]) == (
        ("length", None) if count == 9 else ("stop", stop)
    )


def test_the_stop_text_that_comes_first_is_the_one_that_counts(llm, says):
    says(TEXT)
    result = generate(llm, temperature=0, max_tokens=60, stop=["Done", "z", ", zw", "zwölf"])
    assert result["stop_reason"] == "z" and result["text"] == "One, "


def test_what_an_observer_ends_when_it_hears_of_another_end_is_not_ended_again():
    ended, observer = [], StopTexts()

    def end(seq, *_):
        ended.append(seq)
        observer.cleared()

    observer.started(SimpleNamespace(end=end))
    observer.texts = {name: SimpleNamespace(find_stop=lambda: "stop") for name in ("a", "b")}
    observer.after_step(SimpleNamespace(drawing={"a": 1, "b": 1}))
    assert ended == ["a"]


@pytest.mark.parametrize(
    "stop, winner",
    [
        (["z", ", z"], ", z"),  # begins first
        ([", z", "zw"], ", z"),
        ([", z", ", zw"], ", z"),  # begins where the other does, and is listed first
        ([", zw", ", z"], ", zw"),
    ],
)
def test_of_stop_texts_that_one_token_completes_the_first_to_begin_wins(llm, monkeypatch, stop, winner):
    vocabulary = Tokenizer(models.WordLevel({"One": 0, ", zwölf": 1, ".": 2}, "."))
    vocabulary.decoder = decoders.Fuse()
    monkeypatch.setattr(llm, "tokenizer", transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary))
    logits = torch.eye(257)

    def begin() -> None:
        coming = iter([0, 1])
        monkeypatch.setattr(llm.model_runner.model, "compute_logits", lambda _: logits[[next(coming, 2)]])

    for included, text in ((False, "One"), (True, "One" + winner)):
        params = SamplingParams(0, 9, True, stop=stop, include_stop_str_in_output=included)
        begin()
        [result] = llm.generate([PROMPT], params, use_tqdm=False)
        assert (result["text"], result["stop_reason"], result["token_ids"]) == (text, winner, [0, 1])
        begin()
        assert "".join(llm.stream(PROMPT, params)) == text


def test_a_stop_text_that_does_not_come_changes_nothing(llm):
    generate(llm, temperature=0, max_tokens=20)  # fills the cache
    free = generate(llm, temperature=0, max_tokens=20)
    assert generate(llm, temperature=0, max_tokens=20, stop="never\n seen") == free


def test_requests_with_and_without_stops_do_not_disturb_each_other(llm):
    prompts = [[i, *PROMPT] for i in range(8)]
    free = llm.generate(prompts, SamplingParams(0, 30, True), use_tqdm=False)
    stops = [result["text"][4:5] if i % 2 else () for i, result in enumerate(free)]
    params = [SamplingParams(0, 30, True, stop=stop) for stop in stops]
    for result, whole, stop in zip(llm.generate(prompts, params, use_tqdm=False), free, stops, strict=True):
        if stop:
            assert result["text"] == whole["text"][: whole["text"].index(stop)]
        else:
            assert tokens_of([result]) == tokens_of([whole])


def test_a_seed_draws_the_same_tokens_in_any_company(llm):
    params = SamplingParams(1.0, 20, True, seed=5)
    [alone] = llm.generate([PROMPT], params, use_tqdm=False)
    others = [SamplingParams(1.0, 30, True) for _ in range(4)]
    together = llm.generate([PROMPT] * 5, [*others[:2], params, *others[2:]], use_tqdm=False)
    assert tokens_of(together[2:3]) == tokens_of([alone])
    assert len({tuple(tokens) for tokens in tokens_of(together)}) == 5


@pytest.mark.parametrize(
    "block_size, length, computed",
    [
        (16, 1, 1),
        (16, 40, 8),  # whole blocks are shared at once, waiting for the rest would not pay
        (48, 40, 40),
        (96, 65, 1),
        (96, 95, 1),
        (96, 96, 1),
        (96, 97, 1),
        (96, 150, 54),
        (96, 180, 1),
        (None, 40, 40),
    ],
)
def test_n_completions_compute_a_long_prompt_once(engine, monkeypatch, block_size, length, computed):
    """But for its last token, whose logits each completion draws from."""
    options = dict(kvcache_block_size=block_size) if block_size else dict(enable_prefix_caching=False)
    with LLM(engine.config.model, **{**EXACT, "num_kvcache_blocks": 40, **options}) as other:
        other._overlap = length % 2 == 0
        prefill, lengths = other.batches.prefill, []

        def counting(sequences):
            batch = prefill(sequences)
            lengths.extend(batch.lens_q)
            return batch

        monkeypatch.setattr(other.batches, "prefill", counting)
        prompts = [[i, *(j % 250 for j in range(length - 1))] for i in range(2)]
        results = other.generate(prompts, SamplingParams(1.0, 20, True, n=3, seed=7), use_tqdm=False)
        assert sorted(lengths) == sorted([length] * 2 + [computed] * 4)
        assert results[0]["num_cached_tokens"] == 0
    alone = [SamplingParams(1.0, 20, True, seed=7 + i) for i in range(3)]
    for prompt, result in zip(prompts, results, strict=True):
        assert tokens_of(engine.generate([prompt] * 3, alone, use_tqdm=False)) == tokens_of(result["outputs"])


@pytest.mark.parametrize(
    "options, overlap, max_tokens",
    [
        (dict(num_kvcache_blocks=9), True, 30),  # preemption
        (dict(num_kvcache_blocks=9), False, 30),
        (dict(max_num_batched_tokens=24), True, 30),  # chunks
        (dict(max_num_batched_tokens=24), True, 1),
        (dict(max_num_seqs=2), False, 30),
        (dict(max_num_seqs=1), True, 30),
        (dict(max_num_seqs=1), True, 1),
        (dict(num_kvcache_blocks=9, enable_prefix_caching=False), True, 30),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_forecast")
def test_n_completions_do_not_depend_on_the_schedule(engine, options, overlap, max_tokens):
    prompts = [[i, *PROMPT][: 41 - 9 * i] for i in range(4)]
    params = SamplingParams(1.0, max_tokens, True, n=3, seed=3)
    expected = engine.generate(prompts, params, use_tqdm=False)
    with LLM(engine.config.model, **EXACT, **{"num_kvcache_blocks": 60, **options}) as other:
        other._overlap = overlap
        results = other.generate(prompts, params, use_tqdm=False)
        assert_empty(other)
    assert [result["outputs"] for result in results] == [result["outputs"] for result in expected]


def test_a_leader_that_is_aborted_leaves_the_other_completions_alone(llm):
    expected = generate(llm, temperature=1.0, max_tokens=20, n=3, seed=1)["outputs"]
    for num_steps in range(4):
        llm.scheduler.clear()
        request = llm.prompts.read(PROMPT, SamplingParams(1.0, 20, True, n=3, seed=1))
        group = llm.queue(request)
        for _ in range(num_steps):
            llm.step()
        llm.abort(group[0].seq_id)
        while not llm.is_finished():
            llm.step()
        assert [seq.completion_token_ids for seq in group[1:]] == tokens_of(expected[1:])


def test_n_completions_share_the_prompt_and_differ(llm):
    llm.scheduler.clear()
    result = generate(llm, temperature=1.0, max_tokens=20, n=4, seed=7)
    outputs = result["outputs"]
    assert len({tuple(output["token_ids"]) for output in outputs}) == len(outputs) == 4
    assert {name: result[name] for name in outputs[0]} == outputs[0]
    assert result["num_cached_tokens"] == 0
    again = generate(llm, temperature=1.0, max_tokens=20, n=4, seed=7)
    assert again["outputs"] == outputs
    assert generate(llm, temperature=1.0, max_tokens=20, seed=9)["token_ids"] == outputs[2]["token_ids"]
    with pytest.raises(ValueError, match="n=4"):
        llm.add_request(PROMPT, SamplingParams(n=4))


def test_after_the_highest_seed_comes_0(llm):
    outputs = generate(llm, temperature=1.0, max_tokens=20, n=2, seed=2**63 - 1)["outputs"]
    assert outputs[1]["token_ids"] == generate(llm, temperature=1.0, max_tokens=20, seed=0)["token_ids"]


def test_text_is_made_as_asked(llm, monkeypatch):
    free = generate(llm, temperature=0, max_tokens=20)
    bare = generate(llm, temperature=0, max_tokens=20, detokenize=False)
    assert bare["text"] == "" and bare["token_ids"] == free["token_ids"]
    monkeypatch.setattr(llm.prompts, "eos", frozenset({256}))
    monkeypatch.setattr(
        llm.model_runner.model, "compute_logits", lambda hidden: torch.eye(257)[[256] * min(len(hidden), 1)]
    )
    for skip, text in ((True, ""), (False, "<|end|>")):
        params = SamplingParams(0, 5, skip_special_tokens=skip, include_stop_str_in_output=True)
        assert llm.generate([[1]], params, use_tqdm=False)[0]["text"] == text


BAD = [
    ("seed", (-1, 2**63, 1.5, "1", True)),
    ("n", (0, -1, 1.0, None, True)),
    ("stop", ("", ["a", ""], [1], 5, b"x", {"a": 1})),
    ("stop_token_ids", ([-1], ["a"], [1.5], [True], 7, "12")),
    *(
        (name, (1, None, "yes"))
        for name in ("include_stop_str_in_output", "skip_special_tokens", "detokenize")
    ),
]


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD for value in values])
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name) as error:
        SamplingParams(**{name: value})
    assert repr(value) in str(error.value)


def test_stop_needs_a_text(tmp_path):
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    folder = make_checkpoint(tmp_path, tokenizer=False)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=20) as llm:
        with pytest.raises(ValueError, match="stop=.*no tokenizer"):
            llm.generate([[1]], SamplingParams(stop="x"), use_tqdm=False)
        assert (
            llm.generate([[1]], SamplingParams(0, 2, stop_token_ids=[319]), use_tqdm=False)[0]["text"] == ""
        )


def test_params_stay_hashable_and_equal_whatever_collections_they_were_given():
    one = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])
    assert one == SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2)) and hash(one)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(stop="ab").stop == ("ab",)


# --- log-probabilities ---


def test_the_text_of_a_token_is_made_once_however_often_it_is_told(llm, monkeypatch):
    params = dict(temperature=1.0, max_tokens=20, logprobs=20, prompt_logprobs=20, seed=1)
    first = generate(llm, **params)
    decode = llm.tokenizer.decode

    def decode_text(token_ids: list[int], **how) -> str:
        assert len(token_ids) == 20, "made again"
        return decode(token_ids, **how)

    monkeypatch.setattr(llm.tokenizer, "decode", decode_text)
    assert generate(llm, **params)["logprobs"] == first["logprobs"]


def test_only_the_rows_that_ask_for_log_probabilities_are_read(llm, monkeypatch):
    read, read_logprobs = [], logprobs.read_logprobs
    noted = lambda found, num: (read.append((found[0], num)), read_logprobs(found, num))[1]  # noqa: E731
    monkeypatch.setattr(logprobs, "read_logprobs", noted)
    params = [SamplingParams(0, 9, True), SamplingParams(0, 5, True, logprobs=3), SamplingParams(0, 9, True)]
    results = llm.generate([[1], [2], [3]], params, use_tqdm=False)
    assert [(len(rows), num_top) for rows, num_top in read if len(rows)] == [(1, 3)] * 5
    assert [list(result.get("logprobs", "")) != [] for result in results] == [False, True, False]


# --- ways to call ---


def test_results_come_as_prompts_finish_and_are_those_of_generate(llm):
    prompts = [[i, *PROMPT] for i in range(4)]
    params = [SamplingParams(0, count, True, n=n) for count, n in ((30, 1), (3, 1), (12, 3), (7, 1))]
    expected = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    found = list(llm.generate_iter(prompts, params))
    assert [i for i, _ in found] == [1, 3, 2, 0]
    assert [result["token_ids"] for _, result in sorted(found, key=lambda pair: pair[0])] == expected
    assert len(found[2][1]["outputs"]) == 3


@pytest.mark.parametrize("how", ["closed", "forgotten", "never begun"])
def test_an_iterator_that_is_left_early_drops_what_is_left(llm, how):
    results = llm.generate_iter([PROMPT, [1]], [SamplingParams(0, 50, True), SamplingParams(0, 3, True)])
    pieces = llm.stream(PROMPT)
    if how != "never begun":
        assert next(results)[0] == 1
        with pytest.raises(RuntimeError, match="idle"):
            llm.generate([[1]], use_tqdm=False)
        with pytest.raises(RuntimeError, match="idle"):
            next(pieces)
    if how == "closed":
        results.close()
    del results, pieces
    assert len(generate(llm, temperature=0, max_tokens=5)["token_ids"]) == 5


@pytest.mark.parametrize("how", ["close", "go on", "forget"])
@pytest.mark.parametrize("kind", ["generate_iter", "generate_from", "stream"])
def test_an_iterator_that_has_done_its_work_leaves_later_calls_alone(llm, kind, how):
    first = {
        "generate_iter": lambda: llm.generate_iter([PROMPT], SamplingParams(0, 3, True)),
        "generate_from": lambda: llm.generate_from([(PROMPT, SamplingParams(0, 3, True))]),
        "stream": lambda: llm.stream(PROMPT, SamplingParams(0, 1, True, allowed_token_ids=[65])),
    }[kind]()
    next(first)
    expected = tokens_of(llm.generate([[1], [2]], SamplingParams(0, 9, True), use_tqdm=False))
    later = llm.generate_iter([[1], [2]], [SamplingParams(0, 3, True), SamplingParams(0, 9, True)])
    found = [next(later)]
    if how == "close":
        first.close()
    elif how == "go on":
        assert list(first) == []
    del first
    found += later
    assert [i for i, _ in found] == [0, 1] and found[1][1]["token_ids"] == expected[1]


def test_an_iterator_that_would_take_more_is_refused_while_another_call_has_the_engine(llm):
    params = SamplingParams(0, 3, True)
    first = llm.generate_from([(PROMPT, params)] * 2, max_unfinished=1)
    next(first)
    later = llm.generate_iter([[1], [2]], [params, SamplingParams(0, 9, True)])
    found = [next(later)]
    with pytest.raises(RuntimeError, match="another call"):
        next(first)
    assert [i for i, _ in [*found, *later]] == [0, 1]


def test_an_iterator_whose_requests_are_dropped_or_told_to_others_ends(llm):
    params = [SamplingParams(0, 3, True), SamplingParams(0, 50, True)]
    for use in (llm.clear, lambda: (llm.abort(*llm.unfinished), llm.generate([[1]], use_tqdm=False))):
        results = llm.generate_iter([[1], PROMPT], params)
        next(results)
        use()
        assert list(results) == []


def test_an_iterator_shares_the_engine_with_nobody(llm):
    results = llm.generate_iter([PROMPT, [1]], [SamplingParams(0, 20, True), SamplingParams(0, 3, True)])
    found = [next(results)]
    for use in (llm.step, lambda: llm.add_request([1], SamplingParams())):
        with pytest.raises(RuntimeError, match="busy with the unfinished requests of another call"):
            use()
    found += results
    assert [(i, len(result["token_ids"])) for i, result in found] == [(1, 3), (0, 20)]
    request_id = llm.add_request([1], SamplingParams(0, 5))
    with pytest.raises(RuntimeError, match="idle"):
        next(llm.generate_from([([1], SamplingParams())]))
    llm.abort(request_id)  # which nobody need be told
    assert len(generate(llm, temperature=0, max_tokens=5)["token_ids"]) == 5


def test_requests_are_taken_only_as_there_is_room_for_them(llm):
    params, taken = SamplingParams(0, 10, True), []

    def requests():
        for i in range(12):
            taken.append(i)
            yield [i, *PROMPT], params

    expected = tokens_of(llm.generate([[i, *PROMPT] for i in range(12)], params, use_tqdm=False))
    found = llm.generate_from(requests(), max_unfinished=3)
    results = {}
    for i, result in found:
        assert len(taken) <= len(results) + 3
        results[i] = result
    assert tokens_of(results[i] for i in range(12)) == expected
    with pytest.raises(ValueError, match=r"requests\[1\] must be \(prompt, SamplingParams\), got 'a'"):
        list(llm.generate_from([([1], params), "a"]))
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"max_unfinished.*{bad}"):
            list(llm.generate_from([], max_unfinished=bad))


def test_bad_arguments_are_refused_at_the_call_not_at_the_first_result(llm):
    with pytest.raises(ValueError, match="max_model_len"):
        llm.generate_iter([[1] * 1000])
    for params in (SamplingParams(n=2), SamplingParams(detokenize=False)):
        with pytest.raises(ValueError, match="stream gives the text of one completion"):
            llm.stream([1], params)


@pytest.mark.parametrize("stop", [(), "Done", ["zwölf, 二十!?", "👍 Do"]])
def test_streamed_pieces_are_whole_characters_and_join_to_the_text(llm, says, stop):
    """Nothing of a stop text is ever shown, however much of it has come."""
    params = SamplingParams(0, len(TEXT.encode()), True, stop=stop)
    says(TEXT)
    [result] = llm.generate([PROMPT], params, use_tqdm=False)
    says(TEXT)
    pieces = list(llm.stream(PROMPT, params))
    assert "".join(pieces) == result["text"]
    assert len(pieces) > 5 and all(pieces) and not any("\ufffd" in piece for piece in pieces)


def test_a_stream_may_end_in_half_a_character_as_generate_does(llm, says):
    params = SamplingParams(0, len(b"One, zw") + 1, True)
    says(TEXT)
    assert "".join(llm.stream(PROMPT, params)) == "One, zw\ufffd"
    token_ids = says(TEXT)
    stop = SamplingParams(0, 50, True, stop_token_ids=[token_ids[6]])
    assert "".join(llm.stream(PROMPT, stop)) == "One, z"


def test_a_prompt_may_be_a_dict(llm):
    params = SamplingParams(0, 5, True)
    expected = tokens_of(llm.generate(["hello"], params, use_tqdm=False))
    given = [{"prompt": "hello"}, {"prompt_token_ids": llm.encode("hello")}]
    assert tokens_of(llm.generate(given, params, use_tqdm=False)) == expected * 2
    assert tokens_of(llm.generate(given[0], params, use_tqdm=False)) == expected
    both = {"prompt": "as it was written", "prompt_token_ids": llm.encode("hello")}
    [result] = llm.generate(both, params, use_tqdm=False)
    assert [result["token_ids"]] == expected and result.prompt == "as it was written"
    wrong = [{"prompt": [1]}, {"prompt_token_ids": "a"}, both | {"seed": 1}, both | {"prompt": 5}]
    for bad in ({}, {"text": "a"}, *wrong):
        with pytest.raises(ValueError, match=r"prompts\[0\]"):
            llm.generate([bad], params, use_tqdm=False)


def test_texts_and_token_ids_turn_into_each_other(llm):
    assert llm.decode(llm.encode(TEXT)) == TEXT
    assert llm.decode([79, 256]) == llm.decode([79])
    assert llm.decode([79, 256], skip_special_tokens=False) == llm.decode([79]) + "<|end|>"
    with pytest.raises(ValueError, match="text must be a string"):
        llm.encode([1])


TEMPLATE = (
    "{% if greeting is defined %}{{ greeting }}{% endif %}"
    "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}{% if add_generation_prompt %}:{% endif %}"
)


@pytest.mark.parametrize(
    "options, prompt",
    [
        ({}, "[user]hi\n[assistant]"),
        (dict(add_generation_prompt=False), "[user]hi\n"),
        (dict(add_generation_prompt=False, continue_final_message=True), "[user]hi"),
        (dict(chat_template=TEMPLATE), "<hi>:"),
        (dict(chat_template=TEMPLATE, chat_template_kwargs={"greeting": "Oh"}), "Oh<hi>:"),
        (dict(chat_template=TEMPLATE, tools=[{"type": "function"}]), "<hi>1:"),
    ],
)
def test_a_chat_is_written_as_asked(engine, options, prompt):
    params = SamplingParams(0, 5, True)
    chat = [{"role": "user", "content": "hi"}]
    expected = tokens_of(engine.generate([prompt], params, use_tqdm=False))
    assert tokens_of(engine.chat([chat, chat], params, use_tqdm=False, **options)) == expected * 2


def test_what_a_template_refuses_is_an_error_with_its_words(engine):
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="conversation 0: no such role"):
        engine.chat(chat, chat_template="{{ raise_exception('no such role') }}")
    with pytest.raises(ValueError, match="add_generation_prompt"):
        engine.chat(chat, continue_final_message=True)


# --- abort ---


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 6, 8, 11])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_aborted_request_leaves_at_any_moment_and_disturbs_nobody(llm, monkeypatch, num_steps, which):
    """Waiting, in the middle of a prompt computed in chunks, decoding, or with its last token under way."""
    monkeypatch.setattr(llm.scheduler, "max_num_batched_tokens", 24)
    monkeypatch.setattr(llm.scheduler, "max_num_seqs", 2)
    prompts = [[which, num_steps, *range(60)], [7] * 20, [which, num_steps, *range(50)]]
    params = [SamplingParams(0, 4 + i, True, stop="never\n seen") for i in range(3)]
    ids = [llm.add_request(*request) for request in zip(prompts, params, strict=True)]
    found = {}
    for _ in range(num_steps):
        found.update(llm.step()[0])
    over = set(found)
    llm.abort(ids[which])
    llm.abort(ids[which])
    llm.abort(10**9)
    if ids[which] not in over:
        assert not llm.is_finished()
    while not llm.is_finished():
        found.update(llm.step()[0])
    assert_empty(llm)
    assert set(found) == set(ids)
    monkeypatch.undo()
    again = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    llm.scheduler.clear()  # with nothing in the cache that an aborted request may have left there
    fresh = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    assert again == fresh
    for i, request_id in enumerate(ids):
        tokens = found[request_id]
        assert tokens == fresh[i][: len(tokens)]
        assert i == which or len(tokens) == len(fresh[i])


def test_the_result_of_an_aborted_request_has_what_there_is(llm):
    results = llm.generate_iter([PROMPT, [1]], [SamplingParams(0, 50, True), SamplingParams(0, 3, True)])
    assert next(results)[1]["finish_reason"] == "length"
    [request_id] = llm.unfinished
    llm.abort(request_id)
    [(index, result)] = results
    assert index == 0 and result["finish_reason"] == "abort" and result["stop_reason"] is None
    free = generate(llm, temperature=0, max_tokens=50)["token_ids"]
    assert result["token_ids"] == free[: len(result["token_ids"])] and result["token_ids"]


def test_a_request_that_is_aborted_before_it_runs_has_nothing_cached(llm):
    request_id = llm.add_request(PROMPT, SamplingParams())
    seq = llm.unfinished[request_id]
    llm.abort(request_id)
    llm.step()
    result = make_result(llm.tokenizer, [seq])
    assert (result["token_ids"], result["finish_reason"], result["num_cached_tokens"]) == ([], "abort", 0)


# --- the end of the context, which is 512 tokens long here ---

WAYS = {
    "generate": lambda llm, prompts, params: llm.generate(prompts, params, use_tqdm=False),
    "generate_iter": lambda llm, *request: [result for _, result in sorted(llm.generate_iter(*request))],
    "generate_from": lambda llm, prompts, params: [
        result for _, result in sorted(llm.generate_from((prompt, params) for prompt in prompts))
    ],
    "chat": lambda llm, prompts, params: llm.chat(
        [[{"role": "user", "content": llm.decode(prompt)}] for prompt in prompts],
        params,
        use_tqdm=False,
        chat_template="{{ messages[0]['content'] }}",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_completion_ends_at_the_context_which_is_said_once_a_call(llm, way):
    prompts = [[65] * 509, [66] * 10, [67] * 510]
    params = SamplingParams(0, 8, True)
    which = {"generate_from": r"prompts\[0\], and maybe later ones"}.get(way, "2 of 3 prompts")
    with pytest.warns(
        UserWarning, match=f"max_tokens=8 reaches beyond the context of 512 tokens for {which}"
    ) as said:
        results = WAYS[way](llm, prompts, params)
    assert len(said) == 1
    assert [len(result["token_ids"]) for result in results] == [3, 8, 2]
    assert all(result["finish_reason"] == "length" for result in results)


@pytest.mark.parametrize("max_tokens, counts", [(None, [3, 1]), (1, [1, 1])], ids=["no limit", "it suffices"])
@pytest.mark.parametrize("way", WAYS)
def test_a_completion_that_the_context_does_not_cut_short_is_not_warned_of(llm, way, max_tokens, counts):
    """Without max_tokens it gets all there is room for; with it, the context may just suffice."""
    prompts, params = [[65] * 509, [66] * 511], SamplingParams(0, max_tokens, True, min_tokens=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = WAYS[way](llm, prompts, params)
    assert [len(result["token_ids"]) for result in results] == counts
    assert all(result["finish_reason"] == "length" for result in results)


@pytest.mark.parametrize("count, named", [(3, "518, 519, 520"), (4, r"517, 518, 519, \.\.\."), (1, "520")])
def test_a_warning_names_a_few_of_many_max_tokens(llm, count, named):
    params = [SamplingParams(0, 520 - i, True) for i in range(count)]
    with pytest.warns(UserWarning, match=f"max_tokens={named} reaches .* for {count} of {count} prompts"):
        llm.generate([[1] * 510] * count, params, use_tqdm=False)


def test_a_stream_and_a_queued_request_end_at_the_context_and_say_so(llm):
    params = SamplingParams(0, 2**31 - 1, True, min_tokens=2**31 - 1, stop_token_ids=[3])
    with pytest.warns(UserWarning, match="for 1 of 1 prompts"):
        assert sum(map(len, llm.stream([65] * 509, params))) == 3
    with pytest.warns(UserWarning, match="for 1 of 1 prompts"):
        request_id = llm.add_request([65] * 509, params)
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    [(found, token_ids)] = finished
    assert found == request_id and len(token_ids) == 3


# --- the end of a script ---

# Modules that keep the engine and its iterators outlive torch's own.
SCRIPT = """
import json
from nanovllm import LLM, SamplingParams
llm = json.llm = LLM({folder!r}, device="cpu", num_kvcache_blocks=20, tensor_parallel_size=2)
print(llm.generate([[1, 2]], SamplingParams(0, 5, True), use_tqdm=False)[0]["token_ids"])
pieces = json.pieces = llm.stream([1, 2], SamplingParams(0, 50, True))
print(next(pieces) != "")
"""


def test_a_script_may_end_without_exit_and_in_the_middle_of_a_stream(engine):
    script = SCRIPT.format(folder=engine.config.model)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    [result] = engine.generate([[1, 2]], SamplingParams(0, 5, True), use_tqdm=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{result['token_ids']}\nTrue\n"


# --- in any company and order ---


def test_random_requests_of_every_kind_have_the_same_results_however_they_are_run(tmp_path):
    make_checkpoint(tmp_path, "qwen3", **CHECKPOINT)
    counts = fuzz(str(tmp_path), 8, 0)
    wanted = "aborted preemptions overlapped scored stop length errors blamed 8-bit".split()
    assert all(counts[name] for name in [*wanted, "stop texts"])
    assert counts["ties"] <= 1


def test_the_fuzz_tells_a_tie_that_rounding_decides_from_a_wrong_answer(engine, monkeypatch):
    request = Question(PROMPT, SamplingParams(0, 1, True))
    logits = torch.eye(257)
    for token_id, lead, is_tie in ((7, 0, True), (9, 1e-6, True), (11, -1e-2, False)):
        found = logits[[7]] + logits[[9]] + (1 + lead) * logits[[11]]
        monkeypatch.setattr(engine.model_runner.model, "compute_logits", lambda _: logits[[token_id]])  # noqa: B023
        [other] = answer_at_once(engine, [request])
        monkeypatch.setattr(engine.model_runner.model, "compute_logits", lambda _: found)  # noqa: B023
        assert rounding_explains(engine, request, other) == is_tie
    assert_empty(engine)


# --- the rest ---


def test_stats_count_what_was_done(engine):
    engine.scheduler.clear()
    before = engine.stats()
    engine.generate([PROMPT, PROMPT, [1]], SamplingParams(0, 10, True), use_tqdm=False)
    after = engine.stats()
    grown = {name: after[name] - before[name] for name in after if name.startswith("num")}
    assert grown == {
        "num_requests_finished": 3,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "num_prompt_tokens": 81,
        "num_cached_tokens": 32,
        "num_copied_tokens": 0,
        "num_generated_tokens": 30,
        "num_grouped_tokens": 0,
        "num_preemptions": 0,
        "num_kv_cache_tokens": 0,
    }
    assert after["cache_hit_rate"] == after["num_cached_tokens"] / after["num_prompt_tokens"]
    assert after["tokens_per_second"] > 0
    blocks = engine.scheduler.block_manager.blocks
    assert after["num_kv_cache_tokens"] == len(blocks) * engine.config.kvcache_block_size
    engine.generate(PROMPT, SamplingParams(0, 10, True), use_tqdm=False)
    again = engine.stats()
    assert again["num_copied_tokens"] - after["num_copied_tokens"] == 7
    assert again["num_cached_tokens"] - after["num_cached_tokens"] == 39
    engine.add_request([1], SamplingParams(0, 2))
    assert engine.stats()["num_requests_waiting"] == 1
    while not engine.is_finished():
        engine.step()


def test_only_tokens_that_somebody_gets_are_counted(llm):
    """Not what a step that is under way draws for a completion that has ended."""
    free = generate(llm, temperature=0, max_tokens=20)["token_ids"]
    place = first_of(free, 4)
    before = llm.stats()["num_generated_tokens"]
    generate(llm, temperature=0, max_tokens=20, stop_token_ids=[free[place]])
    assert llm.stats()["num_generated_tokens"] == before + place + 1


def test_tokens_per_second_are_those_that_somebody_gets_in_the_time_of_all_steps(llm, monkeypatch):
    """Each step takes a second by this clock, which it looks at twice."""

    def seconds() -> float:
        stats = llm.stats()
        return stats["num_generated_tokens"] / stats["tokens_per_second"]

    [stop, *_] = generate(llm, temperature=0, max_tokens=20)["token_ids"][4:]
    before, clock = seconds(), itertools.count()
    monkeypatch.setattr(llm_engine, "time", SimpleNamespace(perf_counter=clock.__next__))
    generate(llm, temperature=0, max_tokens=20, stop_token_ids=[stop])
    assert seconds() - before == pytest.approx(next(clock) // 2)


@pytest.mark.parametrize("kind", ["stop_token_ids", "stop"])
def test_only_tokens_that_somebody_gets_are_in_the_sum_of_logprobs(llm, says, kind):
    token_ids = says(TEXT)[:6]
    end = {"stop": "z", "stop_token_ids": token_ids[-1:]}[kind]
    result = generate(llm, temperature=0, logprobs=0, **{kind: end})
    drawn = [entry[i].logprob for entry, i in zip(result.logprobs, token_ids, strict=True)]
    assert result["token_ids"] == token_ids and all(drawn)
    assert result.outputs[0].cumulative_logprob == pytest.approx(sum(drawn))


def test_the_ways_to_call_in_the_manual_work_as_written(tmp_path, monkeypatch, capsys):
    folder = make_checkpoint(tmp_path, "qwen3", vocab_size=257, max_position_embeddings=1024)
    monkeypatch.setattr("nanovllm.extensions.checkpoints.hub.download", lambda *_, **__: str(folder))
    manual = (Path(__file__).parents[3] / "docs/requests.md").read_text()
    [code] = re.findall(r"## Ways to call\n+```python\n(.*?)```", manual, re.DOTALL)
    exec(code, {"__name__": "__main__"})
    assert "num_requests_finished" in capsys.readouterr().out
