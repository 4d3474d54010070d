"""Many requests of every kind through one engine in a small cache, with the tiny model on the CPU.

`python tests/long/soak.py --requests 20000 --seed 0` prints how much memory is resident on the way. In the
end all blocks must be free, memory must not have grown since the first thousand requests, and a random sample
of the completions must be what a fresh engine gives for each of them alone.
"""

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

import paths  # noqa: F401
import torch

from nanovllm import LLM, SamplingParams
from tiny_checkpoints import EXACT, make_checkpoint

KINDS = [
    {"temperature": 0},
    {},
    {"top_k": 5, "top_p": 0.9},
    {"min_p": 0.05, "logprobs": 2},
    {"temperature": 0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"logit_bias": {3: 2.0}, "bad_words": ["a", "bc"]},
    {"allowed_token_ids": list(range(60)), "min_tokens": 3, "stop_token_ids": [7]},
    {"prompt_logprobs": 1, "stop": ["x", "yz"]},
]
WINDOW = 30  # requests that are unfinished at a time
GROWTH = 0.02  # of resident memory since the first thousand requests: what an allocator's moods may cost


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def random_request(pick: random.Random, shared: list[list[int]]) -> tuple[list[int], SamplingParams]:
    prompt = pick.choice(shared)[: pick.randint(0, 60)] + [
        pick.randrange(256) for _ in range(pick.randint(1, 20))
    ]
    kind = pick.choice(KINDS)
    return prompt, SamplingParams(max_tokens=pick.randint(3, 24), seed=pick.randrange(1000), **kind)


def soak(folder: str, num_requests: int, seed: int, report=print) -> tuple[int, int]:
    """Returns how many completions were compared, and by how many bytes resident memory has grown."""
    pick, sample, first = random.Random(seed), {}, 0
    shared = [[pick.randrange(256) for _ in range(60)] for _ in range(5)]
    options = dict(**EXACT, num_kvcache_blocks=24, max_model_len=128)
    with LLM(folder, max_num_seqs=8, **options) as llm:
        added, done, aborted, unfinished = 0, 0, 0, []
        while done < num_requests:
            while added < num_requests and len(unfinished) < WINDOW:
                prompt, params = random_request(pick, shared)
                request_id = llm.add_request(prompt, params)
                unfinished.append(request_id)
                added += 1
                if pick.random() < 200 / num_requests:
                    sample[request_id] = [prompt, params]
            if pick.random() < 0.01:
                victim = pick.choice(unfinished)
                sample.pop(victim, None)
                llm.abort(victim)
                aborted += 1
            for request_id, token_ids in llm.step()[0]:
                unfinished.remove(request_id)
                if request_id in sample:
                    sample[request_id].append(token_ids)
                done += 1
                if done % max(1, num_requests // 20) == 0:
                    report(f"{done:8,} requests, {resident_bytes() / 2**20:,.1f} MiB resident")
                if done == min(1000, num_requests // 2):
                    first = resident_bytes()
        growth = resident_bytes() - first
        stats = llm.stats()
        assert not llm.scheduler.block_manager.used_block_ids and llm.is_finished()
        assert stats["num_requests_finished"] == num_requests - aborted
        report(f"{stats['num_preemptions']:,} preemptions, {stats['cache_hit_rate']:.0%} of prompts cached")
    with LLM(folder, max_num_seqs=1, enable_prefix_caching=False, **options) as llm:
        for prompt, params, token_ids in sample.values():
            [result] = llm.generate([prompt], params, use_tqdm=False)
            assert result["token_ids"] == token_ids, (prompt, params)
    return len(sample), growth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), "qwen3", vocab_size=257, max_position_embeddings=512)
        compared, growth = soak(folder, args.requests, args.seed)
    print(f"{compared} completions are those of a fresh engine; memory grew by {growth / 2**20:.1f} MiB")
    assert growth < GROWTH * resident_bytes(), "memory grows"
    print(f"in {time.perf_counter() - start:,.0f} s")


if __name__ == "__main__":
    main()
