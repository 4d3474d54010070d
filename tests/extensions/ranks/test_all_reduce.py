"""Sums over ranks through each other's memory. The kernels run here as several ranks on one GPU, one stream
each; engines of several GPUs are at the end.
"""

import os
import signal
import threading
import time

import pytest
import torch
from extension_kernels import sum_and_norm
from gpu_checks import assert_within_rounding, make_prompts

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.ranks import peer_group
from nanovllm.extensions.ranks.kernels import all_reduce
from nanovllm.extensions.ranks.kernels.all_reduce import PeerMemory
from tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.gpu

MAX_SEQS = 300
HALF_BYTES = 1 << 18


class OneGpu:
    """`size` ranks whose buffers lie side by side."""

    def __init__(self, size: int, dtype: torch.dtype):
        num_words = PeerMemory.num_words(size, MAX_SEQS, HALF_BYTES)
        self.buffers = torch.zeros(size, -(-num_words // 4) * 4, dtype=torch.int32, device="cuda")
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.ranks = [
            PeerMemory(rank, addresses, buffer[:num_words], dtype, MAX_SEQS, HALF_BYTES)
            for rank, buffer in enumerate(self.buffers)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(size)]

    def run(self, function, *args):
        """function(rank's PeerMemory, *its args) on all ranks at once; args are lists with one for each."""
        results = []
        torch.cuda.synchronize()
        for rank, stream, *mine in zip(self.ranks, self.streams, *args, strict=True):
            with torch.cuda.stream(stream):
                results.append(function(rank, *mine))
        torch.cuda.synchronize()
        return results

    def compile(self, function, *args) -> None:
        """The same without waiting for each other: loading a kernel may wait for those that run."""
        initial = self.buffers.clone()
        for rank, *mine in zip(self.ranks, *args, strict=True):
            rank.aborted.fill_(1)
            function(rank, *mine)
            torch.cuda.synchronize()
            rank.turn = 0
        self.buffers.copy_(initial)


def norm(rank, *args):
    return rank.all_reduce_add_rms_norm(*args, 1e-6)


@pytest.mark.parametrize("two_hops", [False, True], ids=["one hop", "two hops"])
@pytest.mark.parametrize(
    "dtype, size",
    [(torch.bfloat16, 2), (torch.bfloat16, 4), (torch.float16, 3), (torch.float32, 2), (torch.float32, 4)],
)
def test_every_rank_gets_the_norm_of_the_sum(monkeypatch, dtype, size, two_hops):
    monkeypatch.setattr(all_reduce, "TWO_HOPS_BYTES", 0 if two_hops else 1 << 40)
    two_hops = two_hops and size > 2
    torch.manual_seed(size)
    gpu = OneGpu(size, dtype)
    before = gpu.buffers.clone()
    tolerance = dict(rtol=4 * torch.finfo(dtype).eps, atol=1e-5)  # of the norm's rounding, twice
    for rows, hidden in ((3, 576), (90, 2048)):  # the second in several launches
        weight = torch.rand(hidden, dtype=dtype, device="cuda")
        parts = [torch.randn(rows, hidden, dtype=dtype, device="cuda") for _ in range(size)]
        for part in parts:
            part[:, ::3] = -0.0  # what marks an element that has not arrived
        residual = torch.randn(rows, hidden, dtype=dtype, device="cuda")
        args = parts, [residual] * size, [weight] * size
        gpu.compile(norm, *args)
        normed, total = sum_and_norm(parts, residual, weight, 1e-6)
        for _ in range(3):
            results = gpu.run(norm, *args)
            for rank, (its_normed, its_total) in enumerate(results):
                assert torch.equal(its_normed, results[0][0])
                torch.testing.assert_close(its_normed, normed, **tolerance)
                mine = slice(rank, None, size) if two_hops else slice(None)
                torch.testing.assert_close(its_total[mine], total[mine], **tolerance)
            assert torch.equal(gpu.buffers, before), "room for the next"


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_the_sum(size):
    gpu = OneGpu(size, torch.bfloat16)
    parts = [torch.randn(50, 512, device="cuda").bfloat16() for _ in range(size)]
    gpu.compile(PeerMemory.all_reduce, parts)
    for result in gpu.run(PeerMemory.all_reduce, parts):
        assert torch.equal(result, sum(part.float() for part in parts).bfloat16())


@pytest.mark.parametrize("size", [2, 4])
def test_the_best_of_all_ranks_tokens_wins_and_the_lowest_of_equals(size):
    gpu = OneGpu(size, torch.bfloat16)
    for batch in (5, 300):
        scores = torch.randn(size, batch, device="cuda")
        scores[:, ::4] = torch.tensor([-0.0, float("-inf")], device="cuda")[torch.arange(size) % 2][:, None]
        tokens = (
            torch.arange(size, device="cuda")[:, None] * 1000 + torch.randint(0, 1000, (size, batch)).cuda()
        )
        args = list(scores), list(tokens)
        gpu.compile(PeerMemory.best_token, *args)
        expected = tokens.gather(0, scores.argmax(0)[None])[0]
        expected[::4] = tokens[0, ::4]
        for result in gpu.run(PeerMemory.best_token, *args):
            assert torch.equal(result, expected)


def test_abort_ends_the_wait_for_a_rank_that_never_comes():
    gpu = OneGpu(2, torch.bfloat16)
    part = torch.randn(4, 512, device="cuda").bfloat16()
    gpu.compile(PeerMemory.all_reduce, [part, part])
    done = torch.cuda.Event()
    with torch.cuda.stream(gpu.streams[0]):
        for _ in range(5):
            gpu.ranks[0].all_reduce(part)
        done.record()
    time.sleep(0.2)
    assert not done.query()
    gpu.ranks[0].abort()
    done.synchronize()


# Engines. Their ranks are processes with a GPU each.


def needs_gpus(count: int):
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices")


SIZES = pytest.mark.parametrize("size", [pytest.param(size, marks=needs_gpus(size)) for size in (2, 4)])

MODES = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "preemption": {"kvcache_block_size": 16, "num_kvcache_blocks": 16},
    "chunks": {"kvcache_block_size": 16, "max_num_batched_tokens": 24},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    sizes = dict(hidden_size=128, head_dim=64, num_attention_heads=8, num_key_value_heads=2, vocab_size=323)
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=4, **sizes))


PARAMS = [SamplingParams(temperature=0.8 * (i % 2), max_tokens=64, ignore_eos=True) for i in range(20)]


def tokens(llm: LLM, count: int = 20) -> list[list[int]]:
    results = llm.generate(make_prompts()[:count], PARAMS[:count], use_tqdm=False)
    return [result["token_ids"] for result in results]


@pytest.fixture(scope="module")
def expected(checkpoint):
    with LLM(checkpoint, seed=1) as llm:
        return tokens(llm)


@SIZES
@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("peers", [True, False], ids=["peer memory", "NCCL"])
@pytest.mark.usefixtures("no_forecast")
def test_ranks_give_the_tokens_of_one_gpu_in_float32(checkpoint, expected, monkeypatch, size, options, peers):
    if not peers:
        monkeypatch.setattr(peer_group, "has_peer_access", lambda config: False)
    with LLM(checkpoint, tensor_parallel_size=size, seed=1, **options) as llm:
        assert (llm.ranks.group.peers is not None) == peers
        assert tokens(llm) == expected
        assert tokens(llm, 1) == expected[:1]


@SIZES
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_bfloat16_stays_within_rounding_of_transformers(checkpoint, size, batch):
    prompts = make_prompts(max(batch, 3))[:batch]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with LLM(checkpoint, dtype="bfloat16", tensor_parallel_size=size, max_num_seqs=100) as llm:
        results = llm.generate(prompts, params, use_tqdm=False)
    assert_within_rounding(checkpoint, prompts, results)


@SIZES
@pytest.mark.parametrize("peers", [True, False], ids=["peer memory", "NCCL"])
def test_a_killed_rank_ends_generate_and_leaves_no_memory(checkpoint, expected, monkeypatch, size, peers):
    if not peers:
        monkeypatch.setattr(peer_group, "has_peer_access", lambda config: False)
    for delay in (0.3, 0.5):
        llm = LLM(checkpoint, tensor_parallel_size=size, seed=1)
        before = torch.cuda.mem_get_info()[0]
        victim, killed = llm.ranks._processes[-1], []

        def kill(victim=victim, delay=delay, killed=killed):
            time.sleep(delay)
            killed.append(time.monotonic())
            os.kill(victim.pid, signal.SIGKILL)

        threading.Thread(target=kill).start()
        with pytest.raises(RuntimeError, match=f"rank {size - 1} was killed by SIGKILL"):
            while True:
                llm.generate(make_prompts(), PARAMS, use_tqdm=False)
        assert time.monotonic() - killed[0] < 5
        assert all(process.poll() is not None for process in llm.ranks._processes)
        llm.exit()
        assert torch.cuda.mem_get_info()[0] > before
    with LLM(checkpoint, tensor_parallel_size=size, seed=1) as llm:
        assert tokens(llm) == expected


def test_more_ranks_than_gpus_are_refused_by_number(checkpoint):
    count = torch.cuda.device_count()
    if count >= 8:
        pytest.skip("needs fewer than 8 CUDA devices")
    size = next(n for n in (2, 4, 8) if n > count)
    with pytest.raises(ValueError, match=f"tensor_parallel_size={size} .* there are {count}"):
        LLM(checkpoint, tensor_parallel_size=size)
