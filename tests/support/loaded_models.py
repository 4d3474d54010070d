"""What a model must hold once a checkpoint has been loaded into it."""

from pathlib import Path

import pytest
import torch
from open_checkpoints import open_checkpoint
from torch import nn

from nanovllm.assembly import get_model_class
from tiny_checkpoints import load_reference


def build_model(folder: Path) -> nn.Module:
    config = open_checkpoint(folder).hf_config()
    return get_model_class(config)(config)


def expected_parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Ours by name, put together from the model that transformers loads."""
    model = load_reference(folder)
    theirs = {name: value.clone() for name, value in model.state_dict().items()}  # a file may be rewritten
    if any(".experts.0." in name for name in theirs):
        pytest.skip("transformers 4 has a module for each expert")
    ours = {}
    for name, value in theirs.items():
        if ".experts." in name:
            name, is_joint = name.replace("_bias", ".bias"), "gpt_oss" in type(model).__module__
            name += "" if name.endswith("bias") else ".weight"
            if is_joint:  # inputs first, gates and ups in turn
                value = value.transpose(1, 2) if value.dim() == 3 else value
                value = torch.cat((value[:, ::2], value[:, 1::2]), 1) if "gate_up" in name else value
            ours[name] = value.flatten(0, 1)
            continue
        name = name.replace(".router.", ".gate.")
        if ".shared_expert_gate." in name:  # the last row of the router
            continue
        gate = theirs.get(name.replace(".gate.", ".shared_expert_gate."))
        if ".gate." in name and gate is not None:
            value = torch.cat((value, gate))
        for parts, packed in (("qkv", "qkv_proj"), (("gate", "up"), "gate_up_proj")):
            if f".{parts[0]}_proj." in name:
                others = [theirs[name.replace(f".{parts[0]}_proj.", f".{part}_proj.")] for part in parts]
                ours[name.replace(f"{parts[0]}_proj", packed)] = torch.cat(others)
        if not any(f".{part}_proj." in name for part in ("q", "k", "v", "gate", "up")):
            ours[name] = value + 1 if "norm" in name and "gemma3" in type(model).__module__ else value
    return ours


def assert_same_parameters(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    ours = model.state_dict(keep_vars=True)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
