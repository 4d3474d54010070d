"""What a checkpoint's config.json says, read as the model that it names.

Models known here come first, by class name with their facts. All others are transformers': what reads their
files is handed in, so that nothing here knows it.
"""

from collections.abc import Callable
from typing import Any

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.extensions.models.config import read_decoder
from nanovllm.extensions.models.rope import check_rope_keys
from nanovllm.utils.validation import shown


def read_any_config(
    source: str,
    raw: dict[str, Any],
    model_impl: str,
    models: dict[str, Any],
    read_other: Callable[..., dict[str, Any]],
    type_decides: Callable[[list[str]], bool],
) -> ModelConfig:
    """
    `type_decides` says of names of architectures whether the `model_type` counts in their place. Raises
    ValueError naming the source and what is wrong or not supported.
    """
    try:
        # First, since the others' files have other fields.
        known = find_architectures(raw, models, type_decides) if model_impl != "transformers" else []
        given = {name: value for name, value in raw.items() if value is not None}
        if known:
            return read_decoder(raw, known, models[known[0]].defaults, given)
        if model_impl == "native":
            name = shown(given.get("architectures"))
            raise ValueError(
                f"model_impl='native' has no class for architectures {name}, only for {', '.join(models)}"
            )
        try:
            sizes = read_other(raw, check_rope_keys)
        except ValueError as error:
            raise ValueError(f"{error}; known without transformers: {', '.join(models)}") from None
        kept = ("dtype", "torch_dtype", "quantization_config")
        return read_decoder(raw, [], {}, sizes | {name: given[name] for name in kept if name in given})
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def find_architectures(
    raw: dict[str, Any], models: dict[str, Any], type_decides: Callable[[list[str]], bool]
) -> list[str]:
    """Those of config.json that have a class here, or the one for its `model_type`."""
    names, kind = raw.get("architectures"), raw.get("model_type")
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        names = [str(names)]
    of_type = [name for name, facts in models.items() if facts.model_type == kind]
    known = [name for name in names if name in models]
    return of_type if of_type and not known and type_decides(names) else known
