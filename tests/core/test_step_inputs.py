"""What a step sends and what the model gets: tokens, positions, slots of the KV cache and block tables."""

import pickle

import pytest
from engines import Core, assert_empty, tokens_of

from nanovllm import SamplingParams
from nanovllm.utils.context import get_context
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")
    with Core(str(folder), **EXACT, num_kvcache_blocks=64, max_num_batched_tokens=100) as engine:
        yield engine


@pytest.fixture
def inputs(llm):
    """(token ids, positions, context) of each step from now on, as the model gets them."""
    steps = []
    hook = llm.model_runner.model.register_forward_pre_hook(
        lambda _, given: steps.append((given[0].tolist(), given[1].tolist(), get_context()))
    )
    yield steps
    hook.remove()
    llm.clear()
    assert_empty(llm)


def add(llm, prompt, max_tokens: int = 4):
    return llm.unfinished[llm.add_request(prompt, SamplingParams(0, max_tokens, True))]


def slots(sequence, start: int, end: int) -> list[int]:
    return [sequence.block_table[i // 16] * 16 + i % 16 for i in range(start, end)]


def test_a_prefill_step_gets_the_prompts_one_after_another_and_writes_their_slots(llm, inputs):
    prompts = [[*range(20)], [7], [*range(50, 83)]]
    sequences = [add(llm, prompt) for prompt in prompts]
    llm.step()
    [(tokens, positions, context)] = inputs
    assert tokens == [*range(20), 7, *range(50, 83)]
    assert positions == [*range(20), 0, *range(33)]
    assert context.is_prefill and context.block_tables is None, "there is nothing to read in the cache"
    assert context.cu_seqlens_q.tolist() == context.cu_seqlens_k.tolist() == [0, 20, 21, 54]
    assert (context.max_seqlen_q, context.max_seqlen_k) == (33, 33)
    expected = [slot for seq, n in zip(sequences, (20, 1, 33), strict=True) for slot in slots(seq, 0, n)]
    assert context.slot_mapping.tolist() == expected and len(set(expected)) == 54


def test_what_the_cache_has_of_a_prompt_is_read_and_not_computed(llm, inputs):
    common = [*range(100, 140)]
    first = add(llm, [*common, 1])
    llm.step()
    second = add(llm, [*common, 2, 3])
    llm.step()
    tokens, positions, context = inputs[1]
    assert tokens == [*common[32:], 2, 3] and positions == [*range(32, 42)], "two whole blocks are shared"
    assert context.cu_seqlens_q.tolist() == [0, 10] and context.cu_seqlens_k.tolist() == [0, 42]
    assert context.slot_mapping.tolist() == slots(second, 32, 42)
    assert context.block_tables[0, :3].tolist() == second.block_table
    assert second.block_table[:2] == first.block_table[:2]


def test_a_long_prompt_is_computed_in_chunks_each_of_which_reads_those_before_it(llm, inputs):
    prompt = [i % 256 for i in range(230)]
    sequence = add(llm, prompt)
    for start, end in ((0, 100), (100, 200), (200, 230)):
        assert sequence.num_completion_tokens == 0
        llm.step()
        tokens, positions, context = inputs[-1]
        assert tokens == prompt[start:end] and positions == [*range(start, end)]
        assert context.cu_seqlens_k.tolist() == [0, end]
        assert context.slot_mapping.tolist() == slots(sequence, start, end)
        assert (context.block_tables is None) == (start == 0)
    assert sequence.num_completion_tokens == 1


def test_a_decode_step_gets_the_last_token_of_each_sequence_the_longest_first(llm, inputs):
    short, long = add(llm, [1, 2, 3]), add(llm, [*range(31)])
    llm.step()
    for i in range(2):
        last = [long.last_token, short.last_token]
        llm.step()
        tokens, positions, context = inputs[-1]
        assert not context.is_prefill and tokens == last
        assert positions == [31 + i, 3 + i] and context.context_lens.tolist() == [32 + i, 4 + i]
        written = slots(long, 31 + i, 32 + i) + slots(short, 3 + i, 4 + i)
        assert context.slot_mapping.tolist() == written
        assert context.block_tables[0, : len(long.block_table)].tolist() == long.block_table


def test_a_decode_step_sends_little_however_long_its_sequences_are(llm, monkeypatch):
    """And all that a step sends can be pickled, as it must be for other ranks."""
    call, sizes = llm.model_runner.call, {True: [], False: []}

    def watched_call(name, *args):
        if name == "run":
            batch = pickle.loads(pickle.dumps(args[0]))
            sizes[batch.is_prefill].append(len(pickle.dumps(args[0])))
        return call(name, *args)

    monkeypatch.setattr(llm.model_runner, "call", watched_call)
    found = []
    for length in (5, 85):
        sizes[False].clear()
        llm.generate([[length, i] * length for i in range(3)], SamplingParams(0, 20, True), use_tqdm=False)
        found.append(sizes[False][4:])
    assert found[0] == found[1] and max(found[0]) < 500 < max(sizes[True])


def test_places_on_the_device_serve_one_sequence_after_another(llm):
    prompts = [[i, *range(i)] for i in range(1, 40)]
    params = [SamplingParams(0, 1 + i % 7, True) for i in range(len(prompts))]
    alone = [tokens_of(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)]
    assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == alone
    assert tokens_of(llm.generate(prompts[::-1], params[::-1], use_tqdm=False)) == alone[::-1]
    assert_empty(llm)
