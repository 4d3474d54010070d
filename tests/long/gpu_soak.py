"""One engine that may fill nearly all of a GPU, with everything used that takes memory: it must not run out.

    python tests/long/gpu_soak.py --model qwen3-0.6b --gpu-memory-utilization 0.97

The KV cache is filled and filled again; batches of all sizes, small ones first, ask for each combination of
filters, rules, penalties and log-probabilities, so that a CUDA graph is made for every one; the largest
prefill asks for everything, and prompts have several completions. Prints the least memory that was free.
"""

import argparse
import itertools
import random
import time

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.cuda_graphs import get_graph_sizes

KINDS = {
    "filters": {"top_k": 50, "top_p": 0.9},
    "rules": {"logit_bias": {token_id: 1.0 for token_id in range(300)}, "min_tokens": 2},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "log-probabilities": {"logprobs": 20},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.97)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    pick, start = random.Random(0), time.perf_counter()
    options = dict(gpu_memory_utilization=args.gpu_memory_utilization, max_num_seqs=args.max_num_seqs)
    with LLM(args.model, load_format="dummy", **options) as llm:
        num_blocks, longest = llm.config.num_kvcache_blocks, llm.config.max_model_len
        least = [torch.cuda.mem_get_info()[0]]

        def run(count: int, length: int, **params) -> None:
            prompts = [[pick.randrange(1000) for _ in range(length)] for _ in range(count)]
            results = llm.generate(prompts, SamplingParams(ignore_eos=True, **params), use_tqdm=False)
            assert all(len(result["token_ids"]) == params["max_tokens"] for result in results)
            least.append(torch.cuda.mem_get_info()[0])
            print(
                f"{time.perf_counter() - start:6.1f} s, {least[-1] / 2**30:6.2f} GiB free: {count} prompts "
                f"of {length} tokens, {', '.join(params)}",
                flush=True,
            )

        fill = num_blocks * llm.config.kvcache_block_size // longest + 1
        for _ in range(args.rounds):
            run(fill, longest - 8, max_tokens=8)
            for size in get_graph_sizes(args.max_num_seqs):
                for names in itertools.chain.from_iterable(
                    itertools.combinations(KINDS, n) for n in range(len(KINDS) + 1)
                ):
                    run(size, 8, max_tokens=3, **{k: v for name in names for k, v in KINDS[name].items()})
            everything = {k: v for kind in KINDS.values() for k, v in kind.items()}
            run(args.max_num_seqs, 60, max_tokens=40, prompt_logprobs=20, **everything)
            run(args.max_num_seqs // 8, longest // 2 + 100, max_tokens=20, n=8, **everything)
        graphs = [*filter(None, llm.model_runner.decoded.values())]
        print(f"least free: {min(least) / 2**30:.2f} GiB; {len(graphs)} graphs; {llm.stats()}")


if __name__ == "__main__":
    main()
