"""What is known of each model besides its layers, and the model that a checkpoint's config.json names.

Models known here come first, by the names of their classes with their facts. All others are transformers':
what reads their files is handed in, so that nothing here knows it.
"""

from collections.abc import Callable
from typing import NamedTuple

from nanovllm.extensions.models.config import DecoderConfig, Fields, read_decoder
from nanovllm.extensions.models.decoder import Decoder
from nanovllm.extensions.models.rope import check_rope_keys
from nanovllm.utils.validation import shown


class GGUFFacts(NamedTuple):
    """
    How GGUF files have a model: its name there, and by llama.cpp's names the `modules` of a layer that other
    models do not have so. Some have query and key projections in the order in which llama.cpp rotates them,
    neighbouring rows against each other, and weights of norms that something was added to. `read_fields(raw,
    number)` gives fields besides `raw`, those of all models; number(key, default, kind) is what the file has
    there, or a ValueError that names the key.
    """

    architecture: str
    modules: dict[str, str] = {}
    rotates_neighbours: bool = False
    added_to_norms: float = 0.0
    read_fields: Callable[..., Fields] | None = None


class Facts(NamedTuple):
    """
    `architecture` and `model_type` as in config.json. `defaults` are fields that a file may leave out, as far
    as they are not those of all models; which there are says what files of this model may ask for at all.
    `variant` has attributes of the class `base` that are other ones in this model.
    """

    architecture: str
    model_type: str
    defaults: Fields
    variant: dict[str, bool] = {}
    gguf: GGUFFacts | None = None  # if such files can be read
    base: type[Decoder] = Decoder

    @property
    def model(self) -> type[Decoder]:
        """The class, which has the architecture's name, as errors say it."""
        return type(self.architecture, (self.base,), self.variant)


def read_any_config(
    source: str,
    raw: Fields,
    model_impl: str,
    models: dict[str, Facts],
    read_other: Callable[..., Fields],
    type_decides: Callable[[list[str]], bool],
) -> DecoderConfig:
    """
    `type_decides` says of names of architectures whether the `model_type` counts in their place. Raises
    ValueError naming the source and what is wrong or not supported.
    """
    given = {name: value for name, value in raw.items() if value is not None}
    known = ", ".join(models)
    try:
        # First, since the others' files have other fields.
        facts = None if model_impl == "transformers" else find_facts(given, models, type_decides)
        if facts is not None:
            return read_decoder(raw, given, [facts.architecture], facts.defaults)
        if model_impl == "native":
            name = shown(given.get("architectures"))
            raise ValueError(f"model_impl='native' has no class for architectures {name}, only for {known}")
        try:
            sizes = read_other(raw, check_rope_keys)
        except ValueError as error:
            raise ValueError(f"{error}; known without transformers: {known}") from None
        kept = given.keys() & {"dtype", "torch_dtype", "quantization_config"}
        return read_decoder(raw, sizes | {name: given[name] for name in kept}, [], {})
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def find_facts(
    given: Fields, models: dict[str, Facts], type_decides: Callable[[list[str]], bool]
) -> Facts | None:
    """
    Those of the first architecture in config.json that has a class here, or of its `model_type` where that
    decides in place of these names.
    """
    names = given.get("architectures", [])
    names = [str(name) for name in (names if isinstance(names, list) else [names])]
    known = [models[name] for name in names if name in models]
    if not known and type_decides(names):
        known = [facts for facts in models.values() if facts.model_type == given.get("model_type")]
    return known[0] if known else None
