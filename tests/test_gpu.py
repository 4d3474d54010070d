"""What only a GPU can show: graphs, overlap and kernels together, against transformers and each other."""

import asyncio
import contextlib
import gc
import os
import random
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from gpu_checks import GREEDY, MODES, assert_greedy, assert_within_rounding, make_prompts
from logit_settings import MIXED

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.extensions.prefixes import planner
from nanovllm.extensions.safety import recovery
from nanovllm.layers.attention import HAVE_FLASH
from tiny_checkpoints import UNALIGNED, load_reference, make_checkpoint

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2"])
def checkpoint(request, tmp_path_factory):
    sizes = dict(hidden_size=128, head_dim=64, num_attention_heads=8, num_key_value_heads=2)
    if request.param == "qwen2":
        sizes.update(hidden_size=512, head_dim=None)
    sizes = {name: size for name, size in sizes.items() if size is not None}
    return str(make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=4, **sizes))


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.usefixtures("no_forecast")
def test_every_mode_is_greedy_decoding_of_transformers_in_float32(checkpoint, options, overlap):
    reference, prompts = load_reference(checkpoint).cuda(), make_prompts()
    with LLM(checkpoint, **options) as llm:
        llm._overlap = overlap
        results = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in options)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result["token_ids"]) == GREEDY.max_tokens
        assert_greedy(reference, prompt, result["token_ids"], 2e-3)


@pytest.mark.parametrize(
    "backend",
    [
        "triton",
        "torch",
        pytest.param("flash", marks=pytest.mark.skipif(not HAVE_FLASH, reason="flash-attn is not installed")),
    ],
)
@pytest.mark.parametrize("batch", [1, 3, 20, 100])
def test_bfloat16_stays_within_rounding_of_transformers(checkpoint, backend, batch):
    prompts = make_prompts(max(batch, 3))[:batch]
    with LLM(checkpoint, dtype="bfloat16", attention_backend=backend, max_num_seqs=100) as llm:
        results = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert_within_rounding(checkpoint, prompts, results)


@pytest.mark.parametrize("sizes", UNALIGNED.values(), ids=UNALIGNED)
def test_rows_that_the_copy_engine_cannot_read_stay_within_rounding_too(tmp_path, sizes):
    folder = str(make_checkpoint(tmp_path, "qwen3", seed=5, **sizes))
    with LLM(folder, dtype="bfloat16", max_num_seqs=20) as llm:
        for batch in (2, 20):
            results = llm.generate(make_prompts()[:batch], GREEDY, use_tqdm=False)
            assert_within_rounding(folder, make_prompts()[:batch], results)


def test_sampling_does_not_depend_on_the_company(checkpoint):
    params = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True)
    prompts = make_prompts(10)
    with LLM(checkpoint, seed=3, enable_prefix_caching=False) as llm:
        [alone] = llm.generate(prompts[:1], params, use_tqdm=False)
    with LLM(checkpoint, seed=3, enable_prefix_caching=False, kvcache_block_size=16) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
    assert together[0] == alone


@pytest.fixture(scope="module")
def shaped(checkpoint):
    """Every kind of request at once, in the plain loop and without graphs."""
    return run_shaped(checkpoint, False, enforce_eager=True)


def run_shaped(checkpoint: str, overlap: bool, **options) -> list[dict]:
    params = [SamplingParams(**{"max_tokens": 40, "seed": i, **MIXED[i % len(MIXED)]}) for i in range(20)]
    with LLM(checkpoint, **options) as llm:
        llm._overlap = overlap
        return llm.generate(make_prompts(), params, use_tqdm=False)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_requests_of_every_kind_draw_the_same_tokens_in_every_mode(checkpoint, shaped, options):
    results = run_shaped(checkpoint, True, **options)
    for result, expected in zip(results, shaped, strict=True):
        assert result["token_ids"] == expected["token_ids"]
        for told, entries in zip(result.get("logprobs", ()), expected.get("logprobs", ()), strict=True):
            assert {i: (entry.logprob, entry.rank) for i, entry in told.items()} == {
                i: (pytest.approx(entry.logprob, abs=1e-3), entry.rank) for i, entry in entries.items()
            }


def answer_prompts_that_share(checkpoint: str, monkeypatch, **options) -> list[tuple[list[int], dict]]:
    """
    Prompts and their greedy completions. Tokens are taken over, copied and read in groups, in all sizes of
    graphs as sequences join and end.
    """
    small = dict(
        MIN_SHARED_TOKENS=8, MIN_PREFIX_SAVED=8, MIN_SAVED_TOKENS=64, MIN_ITEM_TOKENS=32, ITEM_STEP=16
    )
    for name, value in small.items():
        monkeypatch.setattr(planner, name, value)
    pick = random.Random(1)
    system, *documents = ([pick.randrange(320) for _ in range(length)] for length in (41, 60, 23))
    begins = [system + documents[0]] * 9 + [system + documents[1]] * 6 + [system] * 3 + [[]] * 2
    prompts = [begin + [pick.randrange(320) for _ in range(pick.randint(1, 20))] for begin in begins]
    lengths = [dict(max_tokens=10 + 5 * (i % 7), n=1 + i % 2) for i in range(20)]
    params = [SamplingParams(0, ignore_eos=True, logprobs=0, **length) for length in lengths]
    with LLM(checkpoint, **options) as llm:
        results = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    assert stats["num_grouped_tokens"] and stats["num_cached_tokens"]
    # In blocks of 16, all that is worth waiting for is in whole ones, and these are admitted together.
    is_mode_of_16 = options.get("kvcache_block_size") == 16 and "num_kvcache_blocks" not in options
    assert stats["num_copied_tokens"] or (is_mode_of_16 and "max_num_batched_tokens" not in options)
    pairs = zip(prompts, results, strict=True)
    return [(prompt, output) for prompt, result in pairs for output in result.get("outputs", [result])]


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
@pytest.mark.usefixtures("no_forecast")
def test_prompts_that_share_are_answered_as_by_transformers(checkpoint, options, monkeypatch):
    reference = load_reference(checkpoint).cuda()
    for prompt, output in answer_prompts_that_share(checkpoint, monkeypatch, **options):
        assert_greedy(reference, prompt, output["token_ids"], 2e-3)


@pytest.fixture(scope="module")
def on_cpus(checkpoint):
    """The same model twice on the CPU: with a cache of floats, and with one of 8 bits."""
    options = dict(device="cpu", num_kvcache_blocks=100)
    with LLM(checkpoint, **options) as exact, LLM(checkpoint, **options, kv_cache_dtype="int8") as rounded:
        yield exact, rounded


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
@pytest.mark.usefixtures("no_forecast")
def test_an_8_bit_cache_makes_tokens_as_likely_as_on_a_cpu(checkpoint, on_cpus, options, monkeypatch):
    """
    Where a prefill reads what decode steps have written here. Numbers that lie on the border of two bytes
    may be rounded otherwise, so it is the mean that counts, held against what rounding to bytes does at all.
    """
    answers = answer_prompts_that_share(checkpoint, monkeypatch, **options, kv_cache_dtype="int8")
    texts = [prompt + output["token_ids"] for prompt, output in answers]
    told = [
        entries[token].logprob
        for _, output in answers
        for token, entries in zip(output["token_ids"], output["logprobs"], strict=True)
    ]
    exact, rounded = (
        [
            logprob
            for (prompt, _), score in zip(answers, llm.score(texts, use_tqdm=False), strict=True)
            for logprob in score["token_logprobs"][len(prompt) :]
        ]
        for llm in on_cpus
    )
    told, exact, rounded = torch.tensor([told, exact, rounded])
    assert (told - rounded).abs().mean() < (exact - rounded).abs().mean() / 5


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "not cached"])
def test_n_completions_are_those_of_as_many_requests(checkpoint, caching):
    """The prompt's blocks are copied for all but the first."""
    params = SamplingParams(1.0, 40, True, n=3, seed=5)
    with LLM(checkpoint, kvcache_block_size=16, enable_prefix_caching=caching) as llm:
        results = llm.generate(make_prompts(), params, use_tqdm=False)
    for i in range(3):
        with LLM(checkpoint, kvcache_block_size=16) as llm:
            alone = llm.generate(make_prompts(), SamplingParams(1.0, 40, True, seed=5 + i), use_tqdm=False)
        assert [result["outputs"][i]["token_ids"] for result in results] == [r["token_ids"] for r in alone]


def test_scores_are_the_log_likelihood_that_transformers_finds(checkpoint):
    reference, prompts = load_reference(checkpoint).cuda(), make_prompts()
    with LLM(checkpoint, max_num_batched_tokens=200) as llm:
        results = llm.score(prompts, use_tqdm=False)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.no_grad():
            logprobs = reference(input_ids=torch.tensor([prompt], device="cuda")).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor([prompt[1:]], device="cuda").T)[:, 0].tolist()
        assert result["token_logprobs"][1:] == pytest.approx(expected, abs=2e-3)


def test_sequences_grow_to_the_longest_there_can_be(checkpoint):
    reference = load_reference(checkpoint).cuda()
    with LLM(checkpoint, kvcache_block_size=16) as llm:
        params = SamplingParams(0.0, 512 - 30, True)
        [result] = llm.generate([[5] * 30], params, use_tqdm=False)
    assert_greedy(reference, [5] * 30, result["token_ids"], 2e-3)


@pytest.mark.alone
def test_memory_is_freed_with_the_engine(checkpoint):
    left = []
    for _ in range(4):
        llm = LLM(checkpoint)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
        used = torch.cuda.memory_allocated()
        llm.exit()
        del llm
        gc.collect()
        left.append(torch.cuda.memory_allocated())
        assert left[-1] < used
    assert left[-1] - left[0] < 1 << 20, "what libraries keep for a process they take once"


@pytest.mark.alone
def test_a_budget_that_holds_no_sequence_is_an_error_that_says_what_helps(checkpoint):
    with pytest.raises(ValueError, match=r"[\d,]+ more than there are.*gpu_memory_utilization"):
        LLM(checkpoint, gpu_memory_utilization=0.001)
    with LLM(checkpoint) as llm:
        assert len(llm.generate([[1]], GREEDY, use_tqdm=False)[0]["token_ids"]) == 64


def test_other_threads_may_use_the_device_while_graphs_are_captured(checkpoint):
    """An embedding model beside the engine: it takes and frees memory, computes, waits for its results."""
    with LLM(checkpoint) as llm:
        expected = [llm.generate(make_prompts(count), GREEDY, use_tqdm=False) for count in range(3, 40, 4)]
    ended, errors, rounds = threading.Event(), [], 0

    def use_device():
        nonlocal rounds
        try:
            while not ended.is_set():
                x = torch.ones(64 + rounds % 7 * 512, 512, device="cuda")
                assert (x @ x.T).trace().isfinite().item()
                torch.cuda.empty_cache()
                torch.cuda.current_stream().synchronize()
                rounds += 1
        except Exception as error:
            errors.append(error)

    other = threading.Thread(target=use_device)
    with LLM(checkpoint) as llm:
        other.start()
        results = [llm.generate(make_prompts(count), GREEDY, use_tqdm=False) for count in range(3, 40, 4)]
        assert len(llm.model_runner.decoded) > 5
    ended.set()
    other.join()
    assert not errors, errors
    assert rounds > 10
    assert [[r["token_ids"] for r in run] for run in results] == [
        [r["token_ids"] for r in run] for run in expected
    ]


two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_cards
@pytest.mark.parametrize("current", [0, 1])
def test_engines_on_two_cards_share_a_thread(checkpoint, current):
    prompts = make_prompts()
    with LLM(checkpoint, device="cuda:0") as llm:
        expected = [result["token_ids"] for result in llm.generate(prompts, GREEDY, use_tqdm=False)]
    torch.cuda.set_device(current)
    try:
        with LLM(checkpoint, device="cuda:0") as one, LLM(checkpoint, device="cuda:1") as two:
            found = {0: {}, 1: {}}
            for engine in (one, two):
                for prompt in prompts:
                    engine.add_request(prompt, GREEDY)
            while not (one.is_finished() and two.is_finished()):  # turn by turn, each with a step under way
                for i, engine in enumerate((one, two)):
                    found[i].update(engine.step()[0])
            assert torch.cuda.current_device() == current
        for tokens in found.values():
            assert [tokens[request_id] for request_id in sorted(tokens)] == expected
    finally:
        torch.cuda.set_device(0)


@two_cards
def test_engines_on_two_cards_are_used_from_two_threads(checkpoint):
    """Which are not those that made them, and whose current device is always the first."""
    prompts = make_prompts()
    with LLM(checkpoint, device="cuda:0") as one, LLM(checkpoint, device="cuda:1") as two:
        expected = [result["token_ids"] for result in one.generate(prompts, GREEDY, use_tqdm=False)]
        found = {}

        def use(engine):
            found[engine] = [engine.generate(prompts, GREEDY, use_tqdm=False) for _ in range(3)]

        threads = [threading.Thread(target=use, args=(engine,)) for engine in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for results in found.values():
            assert [[result["token_ids"] for result in run] for run in results] == [expected] * 3
        assert len(found) == 2


COLD_RUN = """
import os, sys
from nanovllm import LLM, SamplingParams

cache = os.environ["TRITON_CACHE_DIR"]
with LLM(sys.argv[1], dtype="bfloat16", max_num_seqs=300, quantization=(*sys.argv[2:], None)[0]) as llm:
    for observer in llm.model_runner.parts.observers:
        observer.before_first_decode()  # waits for what is still being compiled
    before = set(os.listdir(cache))
    for count in (1, 2, 3, 40, 100, 200, 300):
        prompts = [[(7 * i + j) % 320 for j in range(10 + i % 90)] for i in range(count)]
        params = [SamplingParams(i % 2, 4, True, **[{}, {"top_p": 0.9}][i % 4 // 3]) for i in range(count)]
        llm.generate(prompts, params, use_tqdm=False)
    print(len(before), sorted(set(os.listdir(cache)) - before))
"""


@pytest.mark.alone
@pytest.mark.parametrize("quantization", [(), ("fp8",)], ids=str)
def test_a_start_compiles_what_generate_needs(checkpoint, tmp_path, quantization):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COLD_RUN, checkpoint, *quantization]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    count, late = run.stdout.split(maxsplit=1)
    assert int(count) > 20 and late.strip() == "[]", run.stdout


SANITIZED_RUN = """
import sys
from nanovllm import LLM, SamplingParams

checkpoint, *eager = sys.argv[1:]
options = dict(dtype="bfloat16", kvcache_block_size=16, num_kvcache_blocks=40, enforce_eager=bool(eager))
with LLM(checkpoint, max_num_batched_tokens=512, max_num_seqs=20, **options) as llm:
    for count in (1, 2, 20):
        prompts = [[(7 * i + j) % 320 for j in range(10 + 3 * i)] for i in range(count)]
        extra = [dict(top_k=3, top_p=0.9), dict(logit_bias={1: 2.0}), dict(frequency_penalty=1.0, logprobs=2)]
        extra.append({})
        params = [SamplingParams(i % 2, 12, True, **extra[i % 4]) for i in range(count)]
        assert len(llm.generate(prompts, params, use_tqdm=False)) == count
"""


@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_compute_sanitizer_finds_no_bad_access(checkpoint, eager):
    # Without torch's caching every tensor is an allocation of its own, whose bounds are watched. Graphs need
    # the caching.
    environment = {**os.environ, **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if eager else {})}
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "99", sys.executable, "-c"]
    run = subprocess.run(
        [*command, SANITIZED_RUN, checkpoint, *(["eager"] if eager else [])],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "ERROR SUMMARY: 0 errors" in run.stdout, (
        run.stdout[-3000:] + run.stderr[-3000:]
    )


class Hog:
    """
    Takes what memory the card has left, to the last block of torch's allocator, in the middle of a run, and
    gives it back before the engine recovers from that.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, when: int):
        self.taken: list[torch.Tensor] = []
        self.num_steps, self.when = 0, when
        launch, recover = llm._launch, llm.recover

        def launch_without_memory(*args):
            self.num_steps += 1
            if self.num_steps == self.when:
                self.take()
            return launch(*args)

        def recover_with_memory():
            self.taken.clear()
            recover()

        monkeypatch.setattr(llm, "_launch", launch_without_memory)
        monkeypatch.setattr(llm, "recover", recover_with_memory)

    def take(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for size in (1 << 30, 1 << 26, 1 << 22, 1 << 21, 1 << 20, 1 << 16, 1 << 12, 1 << 9):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    self.taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


@pytest.mark.alone
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("when", [1, 2, 20], ids=["first prefill", "first decode", "later"])
def test_when_memory_runs_out_in_a_step_the_next_one_goes_on(checkpoint, monkeypatch, when, overlap):
    prompts, num_raised, found = make_prompts(), 0, {}
    with LLM(checkpoint, enforce_eager=True) as llm:
        llm._overlap = overlap
        expected = [result["token_ids"] for result in llm.generate(prompts, GREEDY, use_tqdm=False)]
        llm.scheduler.clear()
        hog = Hog(llm, monkeypatch, when)
        ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
        while not llm.is_finished():
            try:
                found.update(llm.step()[0])
            except torch.OutOfMemoryError as error:
                num_raised += 1
                assert hog.taken and "gpu_memory_utilization" in str(error)
        assert num_raised == 1 and [found[request_id] for request_id in ids] == expected


@pytest.mark.alone
@pytest.mark.parametrize("when", [20, 40])  # steps of all the requests
def test_when_memory_runs_out_every_request_of_async_llm_goes_on(checkpoint, monkeypatch, when):
    prompts = make_prompts()

    async def run(llm: AsyncLLM) -> list[list[int]]:
        results = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in prompts))
        return [result["token_ids"] for result in results]

    with AsyncLLM(checkpoint, enforce_eager=True) as llm:
        expected = asyncio.run(run(llm))
        hog = Hog(llm.llm, monkeypatch, when)
        failed, free_variables = [], recovery._free_variables
        monkeypatch.setattr(
            recovery, "_free_variables", lambda error: (failed.append(error), free_variables(error))
        )
        assert asyncio.run(run(llm)) == expected
        assert hog.num_steps > when and [type(error) for error in failed] == [torch.OutOfMemoryError]
