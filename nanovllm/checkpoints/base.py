"""What checkpoints of all kinds have in common: a configuration, tensors, a tokenizer, ends of sequences."""

from collections.abc import Callable, Iterator
from typing import Any

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.utils.validation import check, is_number


class Checkpoint:
    """
    `path` is what opens it again. It can be pickled, for the other ranks. `source` is what errors in the
    configuration name.

    Subclasses have `fields()`, which are those of config.json, `tensors()` and `tokenizer()`.
    """

    fill: Callable[..., None] | None = None  # (model): makes weights up, in place of `tensors`
    # (tensors, model, the names of those that it takes) -> the tensors that it gets
    changes: tuple[Callable[..., Iterator[Any]], ...] = ()
    read_config: Callable[..., ModelConfig] = staticmethod(ModelConfig.from_dict)

    def __init__(self, path: str):
        self.path = self.source = path

    def hf_config(self) -> ModelConfig:
        """What is known of the model. Raises ValueError."""
        return self.read_config(self.source, self.fields())

    def generation_config(self) -> dict[str, Any]:
        """What generation_config.json holds."""
        return {}

    def named_eos(self) -> list[Any]:
        """What the files say of ends of sequences: token ids, lists of ids, None."""
        return [values.get("eos_token_id") for values in (self.generation_config(), self.fields())]

    def eos_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Every token id that ends a sequence, from the files and the tokenizer. Raises ValueError."""
        token_ids: list[int] = []
        for named in (*self.named_eos(), getattr(tokenizer, "eos_token_id", None)):
            for token_id in named if isinstance(named, list) else [named]:
                if token_id is not None:
                    check(
                        is_number(token_id, int, 0), f"{self.path}: eos_token_id must be token ids", token_id
                    )
                    token_ids.append(token_id)
        return tuple(dict.fromkeys(token_ids))
