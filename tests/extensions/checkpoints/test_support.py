"""`python -m nanovllm.extensions.checkpoints.support`: what it says of a model is what an engine does."""

import fnmatch
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from gguf_files import byte_level_metadata, write_gguf
from huggingface_hub.errors import NotASafetensorsRepoError
from quantised_checkpoints import PACKERS, mxfp4, quantise
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers_checkpoints import make

from nanovllm import LLM
from nanovllm.checkpoints.folder import SafetensorsTensor
from nanovllm.extensions.checkpoints import support
from nanovllm.extensions.checkpoints.gguf_file import GGUFTensor
from tiny_checkpoints import edit_json, make_checkpoint, one_thread  # noqa: F401

PUBLISHED = Path(__file__).parents[2] / "support/published_configs.json"


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """Both the command and the engines that it is compared with."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(capsys, monkeypatch, *names: str | Path) -> tuple[int, list[str]]:
    """The exit status and the lines of the command."""
    monkeypatch.setattr(sys, "argv", ["support", *map(str, names)])
    status = support.main()
    return status, capsys.readouterr().out.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"))


def packed(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        kind = "gpt_oss" if name == "mxfp4" else "qwen3"
        floats = make_checkpoint(folder / "floats", kind, tokenizer=False, intermediate_size=128)
        return quantise(floats, folder / "packed", mxfp4() if name == "mxfp4" else PACKERS[name])

    return write


WIDTHS = dict(moe_intermediate_size=32, shared_expert_intermediate_size=32)


def gguf_file(quantisation: str) -> Callable[[Path], Path]:
    return lambda folder: write_gguf(make_checkpoint(folder), quantisation, **byte_level_metadata("qwen2"))


def gguf_of_transformers(folder: Path) -> Path:
    make("qwen2_moe", folder, use_sliding_window=False, layer_types=None, **WIDTHS)
    return write_gguf(folder, "Q8_0")


def gguf_with_mxfp4(folder: Path) -> Path:
    experts = {f"ffn_{part}_exps": "MXFP4" for part in ("gate", "up", "down")}
    return write_gguf(make_checkpoint(folder, "gpt_oss", tokenizer=False), {"": "F32"} | experts)


def with_a_bool(folder: Path) -> Path:
    """Beside the weights, as files of some old models have it."""
    make_checkpoint(folder)
    with_tensors(lambda found: found.update({"model.layers.0.attn.masked_bias": torch.ones(3) > 0}))(folder)
    return folder


KINDS = {
    **{
        name: packed(name)
        for name in ("fp8 block", "pack 4, ordered", "gptq", "awq", "nvfp4", "mxfp4", "nf4, nested")
    },
    "float": lambda folder: make_checkpoint(folder, dtype="bfloat16"),
    "a tensor that is skipped": with_a_bool,
    "experts": lambda folder: make_checkpoint(folder, "qwen3_moe"),
    "of transformers": lambda folder: make("gemma2", folder),
    "transposed": lambda folder: make("gpt2", folder),
    "experts of transformers": lambda folder: make("mixtral", folder),
    "GGUF, in floating point": gguf_file("Q8_0"),
    "GGUF of transformers": gguf_of_transformers,
    "GGUF, experts in MXFP4": gguf_with_mxfp4,
}


@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_formats_are_those_of_an_engine(tmp_path, kind):
    place = str(KINDS[kind](tmp_path))
    lines = support.describe(place)
    with LLM(place, num_kvcache_blocks=8) as llm:
        kinds, count, num_bytes = support.measure(llm.model_runner.model, llm.config)
        token_bytes = llm.model_runner.kv_cache.block_bytes // llm.config.kvcache_block_size
        model = llm.model_runner.model
        theirs = type(getattr(model.lm_head, "model", model)).__name__
    assert lines[1].split()[1] == theirs
    assert lines[2] == f"weights   {kinds}: {8 * num_bytes / count:.1f} bits each, {num_bytes / 1e9:.2f} GB"
    assert lines[3].startswith(f"KV cache  {token_bytes:,} bytes a token, ")


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this CPU computes in float32, from floats"
)
def test_packed_matrices_of_a_gguf_file_count_as_in_the_file(tmp_path):
    file = gguf_file("Q4_0")(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors").items()
    packed = sum(each.numel() for name, each in tensors if "layers" in name and each.dim() == 2)
    every = sum(each.numel() for _, each in tensors)
    bits = (4.5 * packed + 16 * (every - packed)) / every
    line = f"weights   gguf (bytes as in the file), bfloat16: {bits:.1f} bits each"
    assert support.describe(str(file))[2].startswith(line)


def test_no_weight_is_read(tmp_path, folder, monkeypatch):
    file = gguf_file("Q8_0")(tmp_path)

    def fail(*_):
        raise AssertionError("a weight is read")

    monkeypatch.setattr(SafetensorsTensor, "__getitem__", fail)
    monkeypatch.setattr(GGUFTensor, "__getitem__", fail)
    for place in (folder, file):
        assert support.describe(str(place))[1] == "class     Qwen3ForCausalLM of this project"


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [({}, "1, 2, 4"), ({"num_attention_heads": 2}, "1, 2"), ({"intermediate_size": 99}, "1")],
)
def test_it_says_over_how_many_ranks_a_model_can_be_split(tmp_path, changes, ranks):
    assert support.describe(str(make_checkpoint(tmp_path, **changes)))[4] == f"ranks     {ranks}"


def test_a_model_that_transformers_cannot_split_is_for_one_rank(tmp_path):
    assert support.describe(str(make("gpt2", tmp_path)))[4] == "ranks     1"


# Refusals


def with_tensors(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return spoil


def with_config(**changes) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", **changes)


NORM, PROJECTION = "model.norm.weight", "model.layers.1.self_attn.o_proj.weight"
DAMAGES = {
    "a tensor is missing": (with_tensors(lambda found: found.pop(NORM)), f"has no tensor {NORM}"),
    "a tensor has no place": (
        with_tensors(lambda found: found.update(b=found[NORM].clone())),
        "b has no place",
    ),
    "another shape": (
        with_tensors(lambda found: found.update({PROJECTION: found[PROJECTION][:-1].clone()})),
        r"tensor model.layers.1.self_attn.o_proj.weight: shape \(63, 512\), expected \(64, 512\)",
    ),
    "another dtype": (
        with_tensors(lambda found: found.update({NORM: found[NORM].to(torch.int32)})),
        "norm.weight: dtype torch.int32, expected",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no safetensors file"),
    "weights that are cut": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"abc"),
        "is not a complete safetensors file",
    ),
    "an unknown type": (with_config(model_type="a", architectures=["A"]), "model type 'a' is not known"),
    "a type with a state": (
        with_config(model_type="mamba", architectures=["MambaForCausalLM"]),
        "it keeps a state of another kind than keys and values",
    ),
    "an unknown format": (
        with_config(quantization_config={"quant_method": "b"}),
        "quant_method = 'b' is not",
    ),
    "more layers than the file has": (with_config(num_hidden_layers=3, layer_types=None), "has no tensor"),
    "a bad end of sequence": (
        lambda folder: edit_json(folder / "generation_config.json", eos_token_id="a"),
        "eos_token_id must be an integer from 0",
    ),
    "a tokenizer that is none": (
        lambda folder: edit_json(folder / "tokenizer_config.json", tokenizer_class="AutoModel"),
        "tokenizer_class cannot be 'AutoModel'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_an_engine_refuses_is_refused_in_the_same_words(tmp_path, folder, capsys, monkeypatch, damage):
    spoil, problem = DAMAGES[damage]
    spoiled = shutil.copytree(folder, tmp_path / "spoiled")
    spoil(spoiled)
    with pytest.raises(ValueError, match=problem) as error:
        LLM(str(spoiled), num_kvcache_blocks=8)
    assert run(capsys, monkeypatch, spoiled) == (1, [str(spoiled), f"  refused: {error.value}"])


def test_each_of_several_models_has_its_lines(folder, capsys, monkeypatch):
    status, lines = run(capsys, monkeypatch, folder, "nowhere", folder)
    assert status == 1 and lines.count(str(folder)) == 2 and lines.count("nowhere") == 1
    with pytest.raises(ValueError) as error:
        LLM("nowhere")
    assert f"  refused: {error.value}" in lines
    assert run(capsys, monkeypatch, folder)[0] == 0


def test_help_says_what_it_is_for(capsys, monkeypatch):
    with pytest.raises(SystemExit) as end:
        run(capsys, monkeypatch, "--help")
    text = capsys.readouterr().out
    assert end.value.code == 0 and "whether it" in text and "MODEL [MODEL ...]" in text


# The hub


@pytest.fixture
def hub(folder, tmp_path, monkeypatch) -> SimpleNamespace:
    """
    One with one repository, owner/name, whose files are in `folder`; what was fetched of them is in `cache`.
    """
    given = SimpleNamespace(folder=shutil.copytree(folder, tmp_path / "hub"), cache=tmp_path / "cache")
    given.cache.mkdir()

    def fetch(name, allow_patterns, ignore_patterns, **_) -> str:
        if name != "owner/name":
            raise OSError("no such repository")
        for file in given.folder.iterdir():
            if any(fnmatch.fnmatch(file.name, each) for each in allow_patterns):
                shutil.copy(file, given.cache)
        return str(given.cache)

    def headers(_, name) -> SimpleNamespace:
        if not (file := given.folder / "model.safetensors").exists():
            raise NotASafetensorsRepoError(f"{name} is not a safetensors repo")
        with safe_open(file, "pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            tensors = {
                name: SimpleNamespace(shape=each.get_shape(), dtype=each.get_dtype())
                for name, each in slices.items()
            }
        return SimpleNamespace(files_metadata={file.name: SimpleNamespace(tensors=tensors)})

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", headers)
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "list_repo_files",
        lambda *_, **__: [each.name for each in given.folder.iterdir()],
    )
    return given


def test_of_a_hub_id_the_configuration_and_headers_are_enough(hub, folder):
    assert support.describe("owner/name") == support.describe(str(folder))
    assert {file.name for file in hub.cache.iterdir()} == {"config.json", "generation_config.json"}


def test_tensors_on_the_hub_that_do_not_fit_are_refused_as_in_a_folder(hub):
    DAMAGES["another shape"][0](hub.folder)
    with pytest.raises(ValueError, match=rf"model.safetensors: {DAMAGES['another shape'][1]}"):
        support.describe("owner/name")


def test_without_headers_it_says_that_tensors_are_not_compared(hub, folder, monkeypatch):
    def fail(*_):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", fail)
    *lines, last = support.describe("owner/name")
    assert lines == support.describe(str(folder))
    assert last == "tensors   not compared, since the hub gives no headers"


def test_pickles_on_the_hub_have_no_headers(hub):
    (hub.folder / "model.safetensors").rename(hub.folder / "pytorch_model.bin")
    assert support.describe("owner/name")[-1].startswith("tensors   not compared")


def test_a_repository_of_gguf_files_alone_is_refused_as_by_an_engine(hub):
    for file in hub.folder.iterdir():
        file.unlink()
    (hub.folder / "model-Q8_0.gguf").touch()
    for use in (support.describe, LLM):
        with pytest.raises(
            ValueError, match="no safetensors file on the hub, but it has GGUF files; name one"
        ):
            use("owner/name")


def test_an_unknown_hub_id_is_refused_as_by_an_engine(hub, capsys, monkeypatch):
    with pytest.raises(ValueError, match="the hub does not give it: no such repository") as error:
        LLM("owner/other")
    assert run(capsys, monkeypatch, "owner/other") == (1, ["owner/other", f"  refused: {error.value}"])


def test_a_gguf_file_on_the_hub_is_not_fetched(hub, capsys, monkeypatch):
    status, lines = run(capsys, monkeypatch, "owner/name:Q8_0")
    assert status == 1 and "a GGUF file on the hub is described when it is on this machine" in lines[1]
    assert not [*hub.cache.iterdir()]


def test_the_lines_of_a_model_that_many_use(tmp_path, capsys, monkeypatch):
    config = json.loads(PUBLISHED.read_text())["models"]["Qwen/Qwen3-0.6B"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("nanovllm.extensions.checkpoints.hub.read_headers", lambda name: [])
    monkeypatch.setattr("nanovllm.extensions.checkpoints.hub.download", lambda *_, **__: str(tmp_path))
    assert run(capsys, monkeypatch, "Qwen/Qwen3-0.6B") == (
        0,
        [
            "Qwen/Qwen3-0.6B",
            "  model     qwen3, 28 layers, 0.596 billion parameters",
            "  class     Qwen3ForCausalLM of this project",
            "  weights   bfloat16: 16.0 bits each, 1.19 GB",
            "  KV cache  114,688 bytes a token, 0.47 GB for 4,096, 4.70 GB for 40,960",
            "  ranks     1, 2, 4, 8",
            "  tensors   not compared, since the hub gives no headers",
        ],
    )
