"""Weights in files of torch.save: the same as from safetensors, and nothing but tensors comes out of them."""

import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from forked_ranks import forked_ranks  # noqa: F401
from open_checkpoints import open_checkpoint
from safetensors.torch import load_file
from torch.nn import Parameter

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.checkpoints import pickled
from tiny_checkpoints import assert_greedy, load_reference, make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pickled") / "model", "llama", tokenizer=False)


@pytest.fixture
def weights(folder, tmp_path) -> dict[str, torch.Tensor]:
    """Of a copy of the checkpoint in tmp_path, which has lost them."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    return stored


def save_in_parts(folder: Path, weights: dict, count: int) -> None:
    names = [*weights]
    for i in range(count):
        part = {name: weights[name] for name in names[i::count]}
        torch.save(part, folder / f"pytorch_model-{i + 1:05}-of-{count:05}.bin")


@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_those_of_transformers(folder, weights, tmp_path, count):
    # Some are parameters, and some are views whose bytes are in another order.
    for i, (name, tensor) in enumerate(weights.items()):
        if i % 3 == 0:
            weights[name] = Parameter(tensor)
        elif tensor.dim() == 2:
            weights[name] = tensor.t().contiguous().t()
    if count == 1:
        weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        torch.save(weights, tmp_path / "pytorch_model.bin")
        (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"not opened")
    else:
        save_in_parts(tmp_path, weights, count)
    with LLM(str(tmp_path), device="cpu", num_kvcache_blocks=8) as llm:
        [result] = llm.generate([[1, 2, 3]], SamplingParams(0, 8, True), use_tqdm=False)
    assert_greedy(load_reference(folder), [1, 2, 3], result["token_ids"])


def test_where_there_are_safetensors_nothing_else_is_opened(folder, weights, tmp_path):
    shutil.copy(folder / "model.safetensors", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not opened")
    found = {tensor.name: tensor[:] for tensor in open_checkpoint(tmp_path).tensors()}
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in found)


def test_two_ranks_answer_as_one(weights, tmp_path):
    torch.save(weights, tmp_path / "pytorch_model.bin")
    answers = []
    for size in (1, 2):
        with LLM(str(tmp_path), device="cpu", num_kvcache_blocks=8, tensor_parallel_size=size) as llm:
            answers.append(llm.generate([[1, 2, 3]], SamplingParams(0, 4, True), use_tqdm=False))
    assert answers[0][0]["token_ids"] == answers[1][0]["token_ids"]


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def compress(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


SPARSE = torch.eye(3).to_sparse()
CONTENTS = {
    "code": (lambda folder: {"a": Payload(folder / "executed")}, "is not weights alone"),
    "a list": (lambda _: [torch.ones(3)], "must hold tensors by name, got 'list'"),
    "numbers": (lambda _: {"a": 3}, "must hold tensors by name, got 'a'"),
    "dicts": (lambda _: {"model": {"a": torch.ones(3)}}, "must hold tensors by name, got 'model'"),
    "no names": (lambda _: {7: torch.ones(3)}, "must hold tensors by name, got 7"),
    "sparse tensors": (lambda _: {"a": SPARSE}, "must hold tensors by name, got 'a'"),
    "no bytes": (lambda _: {"a": torch.ones(3, device="meta")}, "must hold tensors by name, got 'a'"),
}
DAMAGES = {
    "before 1.6": (
        lambda file: torch.save({}, file, _use_new_zipfile_serialization=False),
        "is not a complete file of torch.save",
    ),
    "text": (lambda file: file.write_bytes(b"hello"), "is not a complete file of torch.save"),
    "cut": (cut, "is not a complete file of torch.save"),
    "compressed": (compress, "must hold uncompressed parts, and a small pickle, got"),
}


@pytest.mark.parametrize("case", [*CONTENTS, *DAMAGES])
def test_what_is_not_weights_is_refused_by_name_and_never_executed(weights, tmp_path, case):
    file = tmp_path / "pytorch_model.bin"
    make, message = CONTENTS.get(case, (lambda _: weights, None))
    torch.save(make(tmp_path), file)
    if case in DAMAGES:
        damage, message = DAMAGES[case]
        damage(file)
    with pytest.raises(ValueError, match=f"pytorch_model.bin.* {message}"):
        LLM(str(tmp_path), device="cpu", num_kvcache_blocks=8)
    assert not (tmp_path / "executed").exists()


def test_a_pickle_of_any_size_is_refused(weights, tmp_path, monkeypatch):
    torch.save(weights, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(pickled, "MAX_BYTES_OF_PICKLE", 100)
    with pytest.raises(
        ValueError, match="pytorch_model.bin must hold uncompressed parts, and a small pickle, got .*pkl"
    ):
        [*open_checkpoint(tmp_path).tensors()]


def test_a_weight_of_a_dtype_that_none_has_is_refused_and_any_other_tensor_may_have_it(weights, tmp_path):
    weights["model.layers.0.attn.masked_bias"] = torch.ones(3, dtype=torch.bool)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with LLM(str(tmp_path), device="cpu", num_kvcache_blocks=8):
        pass
    name = "model.layers.1.self_attn.q_proj.weight"
    weights[name] = weights[name] > 0
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"pytorch_model.bin: .*{name}.*dtype torch.bool"):
        LLM(str(tmp_path), device="cpu", num_kvcache_blocks=8)
