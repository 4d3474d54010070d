"""Does an exact engine give a sequence the same logits in every batch? Compares them bit by bit, on a GPU.

    python tests/long/exact_batches.py --model qwen3-0.6b --batches 1000

Some hundred requests, many of which begin alike, are computed one at a time. Then engines of random settings
(sequences and tokens of a step, block size, with CUDA graphs and without) compute random batches of 1 to 512
of them. Of each token's logits a checksum is kept, which no order of addition changes. `--ordinary` does the
same without exact=True, for which the last line should not say 0. The exit status is 1 if one differs.
"""

import argparse
import random
import time
from collections import defaultdict

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.interfaces import LogitsProcessor

NUM_IDS = 10_000  # of token ids that are drawn


class Checksums(LogitsProcessor):
    """Of the model's logits of every token, by request (in `extra`)."""

    name = "checksums"
    changes_logits = False
    factors = None

    def __init__(self):
        self.found = defaultdict(list)

    def wants(self, params):
        return True

    def drawn(self, raw_logits, tokens, step):
        if self.factors is None:
            generator = torch.Generator(raw_logits.device).manual_seed(0)
            self.factors = torch.randint(
                1, 2**31, raw_logits.shape[1:], device=raw_logits.device, generator=generator
            )
        bits = torch.int16 if raw_logits.element_size() == 2 else torch.int32
        step.told[self.name] = ((raw_logits.view(bits).long() * self.factors).sum(1),)

    def record(self, sequences, drawing, tensors):
        for seq, checksum in zip(drawing, tensors[0].tolist(), strict=False):
            if not seq.is_finished:
                self.found[seq.sampling_params.extra].append(checksum)


def make_requests(pick, count, longest):
    """(prompt, parameters) of each."""

    def tokens(low, high):
        return [pick.randrange(NUM_IDS) for _ in range(pick.randint(low, high))]

    beginnings = [tokens(longest // 8, longest // 2) for _ in range(4)]
    requests = []
    for key in range(count):
        begin = pick.choice([*beginnings, []])
        prompt = begin[: pick.choice([len(begin), pick.randint(0, len(begin))])] + tokens(1, longest // 4)
        params = dict(max_tokens=pick.randint(1, 32), temperature=pick.choice([0, 1.0]), seed=key)
        requests.append((prompt, SamplingParams(**params, ignore_eos=True, extra=key)))
    return requests


def compute(llm, checksums, requests, keys):
    """The checksums of these requests' tokens, computed together."""
    checksums.found.clear()
    llm.generate([requests[key][0] for key in keys], [requests[key][1] for key in keys], use_tqdm=False)
    return dict(checksums.found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of a prompt, about")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--ordinary", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of requests, engines and batches")
    args = parser.parse_args()
    pick, start = random.Random(args.seed), time.perf_counter()
    options = dict(load_format="dummy", exact=not args.ordinary, kv_cache_dtype=args.kv_cache_dtype)
    options |= dict(quantization=args.quantization, max_model_len=4096)
    options |= dict(gpu_memory_utilization=args.gpu_memory_utilization)
    options |= dict(tensor_parallel_size=args.tensor_parallel_size)
    requests = make_requests(pick, args.requests, args.longest)

    def engine(**settings):
        llm = LLM(args.model, **options, **settings, extensions=["exact_batches:Checksums"])
        return llm, llm.parts.logits_processor(Checksums.name)

    llm, checksums = engine(max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=4096)
    with llm:
        expected = {}
        for key in range(args.requests):
            expected |= compute(llm, checksums, requests, [key])
    print(f"alone: {args.requests} requests, {time.perf_counter() - start:.0f} s", flush=True)

    num_sequences = num_different = 0
    for i in range(args.engines):
        settings = dict(
            max_num_seqs=pick.choice([7, 33, 256, 512]) if i else 512,
            max_num_batched_tokens=pick.choice([512, 2048, 10_000, 16_384]),
            kvcache_block_size=pick.choice([16, 48, 256]),
            enforce_eager=i % 4 == 3,
        )
        llm, checksums = engine(**settings)
        with llm:
            for _ in range(-(-args.batches // args.engines)):
                size = min(int(512 ** pick.random()) + pick.randint(0, 3), args.requests)
                for key, found in compute(
                    llm, checksums, requests, pick.sample(range(args.requests), size)
                ).items():
                    num_sequences += 1
                    num_different += found != expected[key]
        print(
            f"{settings}: {num_different} of {num_sequences}, {time.perf_counter() - start:.0f} s", flush=True
        )
    print(f"sequences whose logits differ: {num_different} of {num_sequences}")
    return num_different > 0 and not args.ordinary


if __name__ == "__main__":
    raise SystemExit(main())
