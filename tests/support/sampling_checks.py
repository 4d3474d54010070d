"""Whether tokens are drawn from a distribution."""

import math
import random

import torch


def assert_follows(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-squared test of drawn tokens against a distribution; outcomes too rare for it count as one."""
    count = len(tokens)
    expected = probabilities.double() / probabilities.double().sum() * count
    observed = torch.bincount(tokens.flatten(), minlength=len(probabilities)).double()
    assert len(observed) == len(expected)
    rare = expected < 5
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    observed = torch.cat((observed[~rare], observed[rare].sum()[None]))
    if expected[-1] < 5:
        assert observed[-1] < 30
        expected, observed = expected[:-1], observed[:-1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    bound = freedom + 6 * math.sqrt(2 * freedom) + 6
    assert statistic < bound, (
        f"chi-squared is {statistic:.0f} with {freedom} degrees of freedom, bound {bound:.0f}"
    )


COUNT = 20000
RANDOM_SEEDS = torch.tensor([random.Random(i).getrandbits(63) for i in range(COUNT)])
