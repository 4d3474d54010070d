"""
python -m nanovllm.extensions.exact.check MODEL

Does a trainer compute the log-probabilities that the engine told of the tokens it drew? Prints the largest
difference, and exits with 1 unless it is 0.0.
"""

import argparse
import random
import sys

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.exact.trainer import logprobs, make_exact

LONGEST_PROMPT = 300  # tokens
ROWS = 8  # of the trainer's batches


@torch.no_grad()
def differences(model: str, num_seqs: int, max_tokens: int, temperature: float, exact: bool) -> Tensor:
    """
    float32 [num_seqs, max_tokens]: what transformers' model says of drawn tokens less what the engine said,
    both exact or neither.
    """
    params = SamplingParams(temperature, max_tokens, ignore_eos=True, logprobs=0)
    with LLM(model, exact=exact, logprobs_mode="processed", seed=0) as llm:
        draw, config = random.Random(0), llm.config
        text = draw.choices(range(config.hf_config.vocab_size), k=LONGEST_PROMPT)
        prompts = [text[: draw.randint(1, LONGEST_PROMPT)] for _ in range(num_seqs)]
        results = llm.generate(prompts, params)
    trainer = AutoModelForCausalLM.from_pretrained(config.model, dtype=config.torch_dtype).to(config.device)
    if exact:
        make_exact(trainer)
    texts = [torch.tensor(prompt + each.token_ids) for prompt, each in zip(prompts, results, strict=True)]
    found = []
    for begin in range(0, num_seqs, ROWS):
        padded = pad_sequence(texts[begin : begin + ROWS], True, -1, "left").to(config.device)
        logits = trainer(
            input_ids=padded.clamp(0), attention_mask=padded >= 0, logits_to_keep=max_tokens + 1
        ).logits
        found.append(logprobs(logits[:, :-1], padded[:, -max_tokens:], temperature).cpu())
    told = [[logprob.logprob for place in each.logprobs for logprob in place.values()] for each in results]
    return torch.cat(found) - torch.tensor(told)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m nanovllm.extensions.exact.check", description=__doc__)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="of each sequence")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--compare", action="store_true", help="show the difference without exactness, too")
    options = parser.parse_args()
    for exact in [False, True] if options.compare else [True]:
        found = differences(options.model, options.seqs, options.tokens, options.temperature, exact)
        largest = found.abs().max().item()
        print(f"exact={exact}: {found.numel():,} tokens, largest difference of log-probabilities {largest}")
    return int(largest != 0)


if __name__ == "__main__":
    sys.exit(main())
