"""A checkpoint's tensors by the names, and in the shapes, that transformers' modules have.

The two differ for some architectures, most of all where experts are stored one by one and computed from one
tensor. transformers knows how to rename and convert; here that is applied to tensors as they are read. Where
experts are this project's, what is one tensor is taken apart again.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MASKS = r"\.attn\.attention\.(masked_)?bias$"  # of GPT-Neo, in its older files
EACH_EXPERT = "experts.*."  # in patterns of tensors that transformers joins
EXPERT = re.compile(r"(\.experts\.\d+\.)(\w+)")  # in names of tensors
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass
class Converted:
    """A tensor that was made of those of a file. A transposed one is stored as [in, out]."""

    name: str
    file: str
    value: torch.Tensor
    is_transposed: bool = False

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.value.shape, self.value.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.value[index]


def converted(model: Any, known: Mapping[str, Any], tensors: Iterable[Any]) -> Iterator[Any]:
    """
    The tensors for a model of transformers that has places for these `known` names. What is converted comes
    last. Raises ValueError naming a tensor that cannot be converted.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
    parts = {}  # of an expert, by their names in checkpoints, if experts are loaded one by one
    is_one_by_one = any(map(EXPERT.search, known))
    for each in [*converters]:
        if is_one_by_one and EACH_EXPERT in each.source_patterns[0]:
            converters.remove(each)
            stored = (pattern.split(".")[-2] for pattern in each.source_patterns)
            parts |= zip(stored, PARTS[each.target_patterns[0].rpartition(".")[2]], strict=True)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    ignored = MASKS, *(model._keys_to_ignore_on_load_unexpected or ())
    waiting = defaultdict(list)  # by the new name, tensors and the patterns that theirs match
    for tensor in tensors:
        name, pattern = rename_source_key(tensor.name, renamings, converters, model.base_model_prefix, known)
        if pattern is not None:
            waiting[name].append((tensor, pattern))
            continue
        name = EXPERT.sub(lambda found: found[1] + parts.get(found[2], found[2]), name)
        if name in known:
            tensor = copy.copy(tensor)
            tensor.name = name
            yield tensor
        elif len(tensor.shape) == 3 and name.endswith(tuple(PARTS)):
            yield from experts_of(name, tensor.file, tensor[...], known)
        elif not any(re.search(each, tensor.name) for each in ignored):
            yield tensor  # which has no place, if its name is none of these
    for name, sources in waiting.items():
        sources.sort(key=lambda source: dot_natural_key(source[0].name))
        first, pattern = sources[0]
        converter = copy.deepcopy(by_pattern[pattern])
        for tensor, pattern in sources:
            converter.add_tensor(name, tensor.name, pattern, lambda tensor=tensor: tensor[...])
        try:
            made = converter.convert(name, model=model, config=model.config)
        except Exception as error:  # whatever a foreign file makes of foreign code
            raise ValueError(f"{first.file}: tensor {first.name}: {error!r:.300}") from error
        for target, value in made.items():
            value = value[0] if isinstance(value, list) else value
            yield from experts_of(target, first.file, value, known)


def experts_of(name: str, file: str, value: torch.Tensor, known: Collection[str]) -> Iterator[Converted]:
    """The experts' matrices that make up a tensor; itself if its name is known, or that of something else."""
    parent, _, own = name.rpartition(".")
    if name in known or own not in PARTS:
        yield Converted(name, file, value)
        return
    for number, matrix in enumerate(value):
        for part, rows in zip(PARTS[own], matrix.chunk(len(PARTS[own])), strict=True):
            yield Converted(f"{parent}.{number}.{part}.weight", file, rows)
