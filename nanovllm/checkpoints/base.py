"""What checkpoints of all kinds have in common, besides the methods that `checkpoints/__init__.py` lists."""

from typing import Any

import torch

from nanovllm.utils.validation import shown


class Checkpoint:
    """
    `path` is what opens it again, without asking the hub. `random_weights` says whether weights are made up
    ("dummy") instead of read. It can be pickled, for the other ranks. `device` is where quantised values are
    decoded: whoever loads them says where they will be.
    """

    device = torch.device("cpu")
    tokenizer_source: "Checkpoint | None" = None  # where the tokenizer is, if not here
    adapter: Any = None  # an `Adapter` to be merged into the weights

    def __init__(self, path: str, random_weights: bool = False):
        self.path = path
        self.random_weights = random_weights

    def override(self, fields: dict[str, Any]) -> None:
        """Read config.json as if it had these fields. Raises ValueError if there is no such file."""
        raise ValueError(f"hf_overrides are for config.json, which {self.path!r} does not have")

    def generation_config(self) -> dict[str, Any]:
        """What generation_config.json holds."""
        return {}

    def named_eos(self) -> list[Any]:
        """What the files say of ends of sequences: token ids, lists of ids, None."""
        return []

    def eos_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Every token id that ends a sequence, from the files and the tokenizer. Raises ValueError."""
        token_ids: list[int] = []
        for named in (*self.named_eos(), getattr(tokenizer, "eos_token_id", None)):
            token_ids += named if isinstance(named, list) else [] if named is None else [named]
        for token_id in token_ids:
            if type(token_id) is not int or token_id < 0:
                raise ValueError(f"{self.path}: eos_token_id must be token ids, got {shown(token_id)}")
        return tuple(dict.fromkeys(token_ids))
