"""All processors of this folder."""

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.extensions.logits.bias import BiasProcessor
from nanovllm.extensions.logits.filters import FilterProcessor
from nanovllm.extensions.logits.logprobs import LogprobProcessor, ProcessedLogprobs, TopProcessor
from nanovllm.extensions.logits.penalties import PenaltyProcessor
from nanovllm.extensions.logits.scores import ScoreProcessor


def make_processors(logprobs_mode: str) -> tuple[LogitsProcessor, ...]:
    """A rank's; the first has the budget of biases and bans, the last the scores."""
    return (
        BiasProcessor(),
        PenaltyProcessor(),
        FilterProcessor(),
        TopProcessor(),
        ProcessedLogprobs() if logprobs_mode == "processed" else LogprobProcessor(),
        ScoreProcessor(),
    )
