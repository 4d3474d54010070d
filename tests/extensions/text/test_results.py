"""Results are dicts that answer to attributes, and a stream can give objects."""

import asyncio
import copy
import json
import pickle

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.extensions.text.results import Logprob, Piece
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

OPTIONS = dict(**EXACT, num_kvcache_blocks=200)
GREEDY = SamplingParams(0, 6, True)
KEYS = ["text", "token_ids", "finish_reason", "stop_reason", "num_prompt_tokens", "num_cached_tokens"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, vocab_size=257))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def generate(llm: LLM, prompt, params: SamplingParams):
    [result] = llm.generate([prompt], params, use_tqdm=False)
    return result


def test_a_result_is_a_dict_whose_keys_are_attributes(llm):
    result = generate(llm, "hello", GREEDY)
    assert isinstance(result, dict) and list(result) == KEYS
    assert all(getattr(result, key) == value for key, value in result.items())
    assert json.loads(json.dumps(result)) == result == dict(result)
    with pytest.raises(AttributeError, match="Result has no 'texts', only text, token_ids, "):
        _ = result.texts


def test_a_result_knows_its_prompt(llm):
    token_ids = llm.encode("hello")
    for prompt, text in (("hello", "hello"), (token_ids, None), ({"prompt": "hello"}, "hello")):
        result = generate(llm, prompt, GREEDY)
        assert (result.prompt, result.prompt_token_ids, result.finished) == (text, token_ids, True)
    [result] = llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
    assert result.prompt == "[user]hello\n[assistant]" and result.prompt_token_ids == llm.encode(
        result.prompt
    )


def test_every_prompt_has_a_request_id_of_its_own(llm):
    results = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert len({result.request_id for result in results}) == 3


@pytest.mark.parametrize("n", [1, 3])
def test_outputs_are_there_for_any_n(llm, n):
    params = SamplingParams(1.0, 6, True, n=n, seed=1)
    result = generate(llm, "hello", params)
    assert [output.index for output in result.outputs] == [*range(n)]
    assert ("outputs" in result) == (n > 1)
    for name in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert getattr(result.outputs[0], name) == result[name]
    for output in result.outputs:
        assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (6, "length", None)
        assert output.logprobs is None and output.cumulative_logprob is None
        assert "logprobs" not in output and result.prompt_logprobs is None


def test_the_logprobs_of_an_output_are_summed(llm):
    result = generate(llm, "hello", SamplingParams(0, 6, True, logprobs=2, prompt_logprobs=0))
    [output] = result.outputs
    drawn = [entry[i] for entry, i in zip(output.logprobs, output.token_ids, strict=True)]
    assert all(isinstance(each, Logprob) and each.rank == 1 for each in drawn)
    assert output.cumulative_logprob == pytest.approx(sum(each.logprob for each in drawn))
    assert result.logprobs == result["logprobs"] == output.logprobs
    assert result.prompt_logprobs == result["prompt_logprobs"] and result.prompt_logprobs[0] is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_result_has_all_of_it(llm, copied):
    result = generate(llm, "hello", SamplingParams(1.0, 6, True, n=2, logprobs=1))
    other = copied(result)
    assert other == result and type(other) is type(result)
    assert (other.prompt, other.request_id, other.outputs[1].index) == ("hello", result.request_id, 1)


def test_results_that_come_one_by_one_are_the_same(llm):
    [(_, first)] = llm.generate_iter(["hello"], GREEDY)
    [(_, second)] = llm.generate_from([("hello", GREEDY)], return_exceptions=True)
    for result in (first, second):
        assert result.prompt == "hello" and result.outputs[0].text == result["text"]


# --- streams of objects ---

STREAMED = {
    "plain": GREEDY,
    "logprobs": SamplingParams(0, 20, True, logprobs=2),
    "no text": SamplingParams(0, 5, True, detokenize=False),
    "a stop text": SamplingParams(0, 40, True, stop=["\n", "x", "e"]),
}


def check_pieces(pieces: list[Piece], result: dict) -> None:
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == result["text"]
    assert sum((piece.token_ids for piece in pieces), []) == result["token_ids"]
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert (pieces[-1].finish_reason, pieces[-1]["stop_reason"]) == (
        result["finish_reason"],
        result.stop_reason,
    )
    if "logprobs" in result:
        streamed = sum((piece.logprobs for piece in pieces), [])
        assert [[*entry] for entry in streamed] == [[*entry] for entry in result["logprobs"]]
    else:
        assert pieces[0].logprobs is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_of_objects_has_all_of_the_result(llm, monkeypatch, name, overlap):
    monkeypatch.setattr(llm, "_overlap", overlap)
    expected = generate(llm, "hello", STREAMED[name])
    check_pieces(list(llm.stream("hello", STREAMED[name], objects=True)), expected)


def test_a_stream_of_objects_needs_one_completion(llm):
    with pytest.raises(ValueError, match="needs n=1, got n=2"):
        llm.stream("hello", SamplingParams(n=2), objects=True)
    with pytest.raises(ValueError, match="objects must be True or False, got 'yes'"):
        llm.stream("hello", GREEDY, objects="yes")


# --- AsyncLLM ---


@pytest.fixture(scope="module")
def front(folder):
    with AsyncLLM(folder, **OPTIONS) as front:
        yield front


def test_async_results_have_the_same_attributes(front, llm):
    async def run():
        chat = [{"role": "user", "content": "hello"}]
        return await asyncio.gather(
            front.generate("hello", GREEDY),
            front.chat(chat, GREEDY, add_generation_prompt=False),
            front.score("ab"),
        )

    plain, chat, score = asyncio.run(run())
    assert plain == generate(llm, "hello", GREEDY) | {"num_cached_tokens": 0}
    assert (plain.prompt, plain.outputs[0].text) == ("hello", plain["text"])
    assert chat.prompt == "[user]hello\n" and len(chat["token_ids"]) == 6
    [expected] = llm.score("ab", use_tqdm=False)
    assert score["token_ids"] == expected["token_ids"] and score["logprob"] == pytest.approx(
        expected["logprob"]
    )


def test_the_score_of_one_token_is_nothing(front):
    nothing = {"token_logprobs": [None], "logprob": 0, "token_ranks": [None]}
    assert asyncio.run(front.score([5])) == {"token_ids": [5], **nothing}


@pytest.mark.parametrize("name", STREAMED)
def test_async_streams_give_objects_too(front, llm, name):
    async def run():
        return [piece async for piece in front.stream("hello", STREAMED[name], objects=True)]

    check_pieces(asyncio.run(run()), generate(llm, "hello", STREAMED[name]))


def test_what_needs_no_device_is_at_hand(front, llm):
    assert front.encode("hello") == llm.encode("hello")
    assert front.get_tokenizer().decode(front.encode("hello")) == "hello"
    assert front.stats().keys() == llm.stats().keys()


def test_a_chat_is_one_conversation(front):
    chat = [{"role": "user", "content": "hello"}]
    with pytest.raises(ValueError, match="messages must be one conversation, got 2"):
        asyncio.run(front.chat([chat, chat], GREEDY))
    with pytest.raises(ValueError, match="sampling_params for prompt must be SamplingParams, got 5"):
        asyncio.run(front.chat(chat, 5))


# --- a request_id of one's own ---


def test_an_own_id_names_a_request_to_abort(front):
    async def run():
        task = asyncio.create_task(front.generate("hello", SamplingParams(0, 400, True), request_id="mine"))
        async for _ in front.stream("hello", GREEDY, request_id="other"):
            pass  # by now the first one runs as well
        with pytest.raises(ValueError, match="request_id must be a new one, got .*'mine'"):
            await front.generate("hello", GREEDY, request_id="mine")
        front.abort("mine")
        front.abort("nobody's")
        return await task

    result = asyncio.run(run())
    assert (result.request_id, result["finish_reason"]) == ("mine", "abort") and len(
        result["token_ids"]
    ) < 400
    assert asyncio.run(front.generate("hello", GREEDY, request_id="mine")).request_id == "mine"
    with pytest.raises(ValueError, match="request_id must be a text, got 5"):
        asyncio.run(front.generate("hello", GREEDY, request_id=5))


def test_add_request_step_and_abort_know_an_own_id(llm):
    assert llm.add_request("hello", GREEDY, request_id="mine") == "mine"
    other = llm.add_request("hello", GREEDY)
    with pytest.raises(ValueError, match="request_id must be a new one, got .*'mine'"):
        llm.add_request("hello", GREEDY, "mine")
    with pytest.raises(ValueError, match="request_id must be a text, got 5"):
        llm.add_request("hello", GREEDY, 5)
    assert llm.add_request("hello", GREEDY, "third") == "third"
    llm.abort("third")
    found = {}
    while not llm.is_finished():
        found |= dict(llm.step()[0])
    assert len(found["mine"]) == 6 and found[other] == found["mine"] and found["third"] == []
    llm.abort("mine")  # has finished: nothing happens
    with pytest.raises(ValueError, match="request_id must be an integer, got 'nobody'"):
        llm.abort("nobody")
    llm.add_request("hello", GREEDY, "mine")
    assert len(llm._own_ids) == 2, "those of requests that have ended are forgotten"
    llm.clear()
