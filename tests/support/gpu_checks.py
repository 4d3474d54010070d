"""Engines on a GPU against transformers."""

import random

import torch

from nanovllm import SamplingParams
from nanovllm.extensions.quantised.kernels import fp8_linear
from tiny_checkpoints import load_reference

MODES = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "blocks of 16": {"kvcache_block_size": 16},
    "preemption": {"kvcache_block_size": 16, "num_kvcache_blocks": 16},
    "chunks": {"kvcache_block_size": 16, "max_num_batched_tokens": 24},
    "twelve sequences at most": {"max_num_seqs": 12},
    "torch attention": {"attention_backend": "torch"},
}
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def make_prompts(count: int = 20, seed: int = 0) -> list[list[int]]:
    pick = random.Random(seed)
    prompts = [[pick.randrange(320) for _ in range(pick.randint(1, 100))] for _ in range(count - 2)]
    return [*prompts, prompts[-1], [*prompts[-1][:50], 3, 4]]


def assert_greedy(model, prompt: list[int], completion: list[int], tolerance: float) -> None:
    """Each token is among those that transformers, on the GPU, ranks first, within `tolerance`."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]], device="cuda")).logits[0].float()
    logits = logits[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(completion, device="cuda")[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max().item() < tolerance


def assert_within_rounding(checkpoint: str, prompts: list[list[int]], results: list[dict]) -> None:
    """Tokens drawn in bfloat16 are among the best in exact arithmetic, within transformers' own rounding."""
    rounded, exact = load_reference(checkpoint, torch.bfloat16).cuda(), load_reference(checkpoint).cuda()
    with torch.no_grad():
        for parameter in exact.parameters():  # the same weights, computed with in float32
            parameter.copy_(parameter.bfloat16())
        for prompt, result in zip(prompts, results, strict=True):
            ids = torch.tensor([[*prompt, *result["token_ids"]]], device="cuda")
            rounding = (rounded(input_ids=ids).logits - exact(input_ids=ids).logits).abs().max().item()
            assert_greedy(exact, prompt, result["token_ids"], 4 * rounding)


def logits_of(model, prompts: list[list[int]], results: list[dict]) -> torch.Tensor:
    """Those from which each token of the results was drawn, float32 [tokens, vocabulary]."""
    found = []
    for prompt, result in zip(prompts, results, strict=False):
        ids = torch.tensor([[*prompt, *result["token_ids"]]], device=model.device)
        with torch.no_grad():
            found.append(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float())
    return torch.cat(found)


def gaps(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """How much less likely these tokens are than the likeliest, as logits."""
    return logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]


def round_inputs(model, group: int) -> None:
    """Let a model of transformers multiply what `fp8_linear.quantise` makes of the input."""

    def rounded(_module, args):
        x = args[0].flatten(0, -2)
        rows = fp8_linear.quantise_torch(x, group)
        codes = rows.codes[: rows.rows].float()
        if not group:
            return ((codes * rows.scales[: rows.rows, None]).to(x.dtype).view_as(args[0]),)
        scales = rows.scales[:, : rows.rows].T[..., None]
        return ((codes.unflatten(1, (-1, group)) * scales).to(x.dtype).view_as(args[0]),)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounded)


def assert_answers_as(
    reference: str, prompts: list[list[int]], results: list[dict], group: int | None = None
) -> None:
    """
    Tokens are on average little less likely to transformers than the likeliest: not more than twice what its
    own rounding costs, of activations to bfloat16, or, where they get 8 bits here, to these, with a scale for
    `group` of them (0: for a row).
    """
    device = "cuda"
    tokens = torch.cat([torch.tensor(result["token_ids"], device=device) for result in results])
    exact = logits_of(load_reference(reference).to(device), prompts, results)
    rounded = load_reference(reference, torch.bfloat16).to(device)
    rounded.set_experts_implementation("eager")  # the others want rows of 16 bytes
    if group is not None:
        round_inputs(rounded, group)
    noise = gaps(exact, logits_of(rounded, prompts, results).argmax(-1)).mean().item()
    found = gaps(exact, tokens).mean().item()
    assert found < 2 * noise + 0.01, (found, noise)
