"""Any decoder that transformers can build: its modules, with this project's attention and matrix products.

transformers computes everything between the products as its authors wrote it. Its attention modules call a
function that is registered under a name; here that is one which stores keys and values in the paged cache and
attends to those of each sequence, so that many sequences can be computed as one row of tokens. Linear layers
become this project's, so that formats of weights work, and so does what has a faster form here. Nothing here
knows an architecture by name.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from nanovllm.distributed.group import get_group
from nanovllm.extensions.transformers.classes import CLASSES, change_classes
from nanovllm.extensions.transformers.config import transformers_config
from nanovllm.extensions.transformers.faster import PACKED, change_methods, replacement
from nanovllm.extensions.transformers.parts import NAME, register
from nanovllm.extensions.transformers.ranks import cut_modules
from nanovllm.extensions.transformers.weights import Converted, converted
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead


class TransformersForCausalLM(nn.Module):
    """
    Its parameters have the names that transformers gives them, which are those of checkpoints. Each of
    `attention` says in `features` what of it is not plain (see parts.py); whoever builds a model heeds that.
    """

    packed_modules_mapping = PACKED

    def __init__(self, config: Any):
        """`config` has what config.json says, `raw`, and how many layers are to be built."""
        super().__init__()
        model = build(config)
        base = model.base_model
        fix_rotations(model)
        change_methods(base)
        self.attention = nn.ModuleList(try_out(base, config.num_hidden_layers))
        model.config._experts_implementation = "grouped_mm"  # which is faster, but not for meta tensors
        for parent in [*base.modules()]:
            for name, child in [*parent.named_children()]:
                if (faster := replacement(child)) is not None:
                    setattr(parent, name, faster)
        give_memory(model)
        for name, child in model.named_children():
            self.add_module(name, child)
        # No child, or its parameters would have other names; and under this name there may be one already.
        vars(self)["lm_head"] = Head(model)
        # A mask of four dimensions is one that transformers passes on as it is, and `attend` needs none.
        self.register_buffer("no_mask", torch.empty(1, 1, 1, 1), persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions int64 [tokens] -> hidden states [tokens, hidden_size]."""
        tokens = {"input_ids": input_ids[None], "position_ids": positions[None]}
        return self.lm_head.base(**tokens, attention_mask=self.no_mask, use_cache=False).last_hidden_state[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """-> logits [sequences, vocab_size]."""
        return self.lm_head(hidden_states)

    def converted(self, tensors: Iterable[Any], known: Mapping[str, Any]) -> Iterator[Any]:
        """A checkpoint's tensors by the `known` names, and in the shapes, that parameters have here."""
        modules = self.named_modules()
        turned = {f"{name}.weight" for name, each in modules if getattr(each, "is_stored_transposed", False)}
        for tensor in converted(self.lm_head.model, known, tensors):
            if tensor.name in turned:
                tensor = Converted(tensor.name, tensor.file, tensor[...].t(), is_transposed=True)
            yield tensor


def build(config: Any) -> Any:
    """
    The model of transformers, its parameters without memory. Raises ValueError if it does not let other
    attention be used.
    """
    from transformers import AutoModelForCausalLM

    theirs = transformers_config(config.raw)
    register()
    has_own = theirs.model_type in CLASSES
    theirs.num_hidden_layers = config.num_hidden_layers
    with without_memory():
        try:
            model = AutoModelForCausalLM.from_config(
                theirs,
                attn_implementation="eager" if has_own else NAME,
                experts_implementation="batched_mm",
                dtype=torch.get_default_dtype(),
            )
        except Exception as error:  # whatever a foreign file makes of foreign code
            raise ValueError(f"transformers cannot build the model: {error!r:.300}") from error
    if model.base_model is model or model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} is not supported: it has no head for a vocabulary")
    if has_own:
        change_classes(model)
    return model.eval()


def without_memory() -> RemovableHandle:
    """Parameters that this thread makes in this context take no memory, but buffers have their values."""
    thread = threading.get_ident()

    def on_meta(_module: nn.Module, _name: str, param: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread:
            return None
        return nn.Parameter(param.detach().to("meta"), requires_grad=False)

    return register_module_parameter_registration_hook(on_meta)


def give_memory(model: nn.Module) -> None:
    """
    Give the parameters that have no memory some. They stay the same objects, so what is tied stays tied.
    Buffers that checkpoints have become parameters, which are loaded.
    """
    model.tie_weights()
    for module in model.modules():
        for name in {*module._buffers} - module._non_persistent_buffers_set:
            setattr(module, name, nn.Parameter(module._buffers.pop(name), requires_grad=False))
    for name, param in model.named_parameters():
        if param.is_meta:
            memory = torch.empty(param.shape, dtype=param.dtype)
            torch.utils.swap_tensors(param, nn.Parameter(memory, requires_grad=False))
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            param.data = param.float()


def fix_rotations(model: nn.Module) -> None:
    """Within the allowed context no angles depend on a sequence's length: do not compute them anew."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is not None:
            module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"


def try_out(base: Any, num_layers: int) -> list[Attention]:
    """
    The attention of the layers on this rank, as they ask for it on the meta device; those that share keys and
    values have one together. Raises ValueError if a layer has none, or depends on data.
    """
    shares = cut_modules(base)
    buffers = {name: buffer.to("meta") for name, buffer in base.named_buffers()}
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    mask = torch.ones(1, 2, dtype=torch.int64, device="cpu")  # some models look whether all is seen
    inputs = {"input_ids": tokens, "position_ids": tokens, "attention_mask": mask, "use_cache": False}
    try:
        with torch.device("cpu"):  # the default of steps, too
            torch.func.functional_call(base, buffers | shares, (), inputs)
    except ValueError:
        raise
    except Exception as error:
        ranks = f" with tensor_parallel_size={get_group().size}" if shares else ""
        raise ValueError(f"{type(base).__name__} is not supported{ranks}: {error!r:.300}") from error
    found = []
    for module in base.modules():
        if hasattr(module, "nano_vllm_attention"):
            found.append(module.nano_vllm_attention)
            for name, buffer in [*module.named_buffers(recurse=False)]:
                if buffer.dtype == torch.bool:  # a mask, which `attend` does not need
                    delattr(module, name)
    if len(found) != num_layers:
        reason = f"{len(found)} of {num_layers} layers have attention of the usual kind"
        raise ValueError(f"{type(base).__name__} is not supported: {reason}")
    return [*dict.fromkeys(found)]


class Head:
    """
    The LM head with all that transformers' forward does behind it (scales, caps), for hidden states
    [tokens, hidden_size]: the whole model, of which the layers give what they have computed already.
    """

    vocab_start = 0
    __call__ = ParallelLMHead.forward

    def __init__(self, model: Any):
        self.model, self.base = model, model.base_model

    def logits(self, hidden_states: Tensor) -> Tensor:
        """-> logits [tokens, vocab_size]."""
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        class Output(BaseModelOutputWithPastAndCrossAttentions):
            router_logits = shared_kv_states = None  # which some heads ask for

        states = hidden_states[None]
        base = self.base
        layers = getattr(base, "decoder", base)  # where they are in some models
        layers.forward = base.forward = lambda *_args, **_options: Output(last_hidden_state=states)
        try:
            return self.model(input_ids=None, inputs_embeds=states, use_cache=False).logits[0]
        finally:
            for module in {layers, base}:
                del module.forward

    def gather(self, logits: Tensor) -> Tensor:
        return logits
