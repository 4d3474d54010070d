"""GGUF files on the hub, and files that are split: which are fetched, and what an unknown name is told."""

import fnmatch
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from gguf_files import byte_level_metadata, write_gguf
from open_checkpoints import open_checkpoint

from nanovllm import LLM, SamplingParams
from tiny_checkpoints import EXACT, edit_json, make_checkpoint, one_thread  # noqa: F401

PARTS = [f"BF16/model-BF16-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
FILES = (
    """
    README.md config.json mmproj-model-f16.gguf model-Q4_0.gguf model-IQ4_0.gguf model-UD-Q8_0.gguf
    model-Q8_0.gguf sub/model.f16.gguf
""".split()
    + PARTS
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """A whole file and the parts of a split one, by the ends of their names."""
    folder = make_checkpoint(tmp_path_factory.mktemp("source"))
    whole = shutil.copy(write_gguf(folder, **byte_level_metadata("qwen2")), folder / "whole.gguf")
    (folder / "model.gguf").unlink()
    write_gguf(folder, split=9, **byte_level_metadata("qwen2"))
    return {"": Path(whole)} | {file.name[-19:]: file for file in folder.glob("model-*.gguf")}


@pytest.fixture
def hub(files, tmp_path, monkeypatch) -> Path:
    """The cache of a hub with one repository, in which what was fetched appears."""
    cache = tmp_path / "cache"
    cache.mkdir()

    def fetch(name, allow_patterns=(), ignore_patterns=(), local_files_only=False, **options) -> str:
        assert name == "owner/name-GGUF"
        for file in [] if local_files_only else FILES:
            is_allowed, is_ignored = (
                any(fnmatch.fnmatch(file, each) for each in patterns)
                for patterns in (allow_patterns, ignore_patterns)
            )
            if is_allowed and not is_ignored:
                (cache / file).parent.mkdir(exist_ok=True)
                (cache / file).write_bytes(files.get(file[-19:], files[""]).read_bytes())
        return str(cache)

    def list_files(_, name, **options) -> list[str]:
        if name != "owner/name-GGUF":
            raise OSError("no such repository")
        return FILES

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", list_files)
    return cache


def fetched(cache: Path) -> list[str]:
    return sorted(str(file.relative_to(cache)) for file in cache.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (":Q4_0", ["model-Q4_0.gguf"]),
        (":q4_0", ["model-Q4_0.gguf"]),
        (":UD-Q8_0", ["model-UD-Q8_0.gguf"]),
        (":F16", ["sub/model.f16.gguf"]),
        (":BF16", PARTS),
        ("/model-Q8_0.gguf", ["model-Q8_0.gguf"]),
        ("/sub/model.f16.gguf", ["sub/model.f16.gguf"]),
        (f"/{PARTS[0]}", PARTS),
    ],
)
def test_only_the_file_that_is_named_is_fetched(hub, name, expected):
    checkpoint = open_checkpoint("owner/name-GGUF" + name)
    assert checkpoint.path == str(hub / expected[0]) and fetched(hub) == expected
    assert checkpoint.hf_config().architectures == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            ":Q5_K_M",
            "the hub has these: BF16/model-BF16-00001-of-00003.gguf, model-IQ4_0.gguf, model-Q4_0.gguf",
        ),
        ("/other.gguf", "no such file, and of owner/name-GGUF the hub has these: .*sub/model.f16.gguf"),
        (f"/{PARTS[1]}", f"the hub has these: {PARTS[0]}"),
        (":Q8_0", "several fit: model-Q8_0.gguf, model-UD-Q8_0.gguf"),
        ("", r"one, as in 'owner/name-GGUF:Q4_K_M' or 'owner/name-GGUF/BF16/model.*: .*model-Q8_0.gguf"),
    ],
)
def test_a_name_that_fits_no_file_or_several_is_told_what_there_is(hub, name, problem):
    with pytest.raises(ValueError, match=problem) as error:
        open_checkpoint("owner/name-GGUF" + name)
    assert "mmproj" not in str(error.value) and set(fetched(hub)) <= {"config.json"}


def test_without_a_network_files_in_the_cache_are_found(hub, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no network")

    open_checkpoint("owner/name-GGUF:Q4_0")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    assert open_checkpoint("owner/name-GGUF:Q4_0").path == str(hub / "model-Q4_0.gguf")
    with pytest.raises(ValueError, match="the hub has these: model-Q4_0.gguf$"):
        open_checkpoint("owner/name-GGUF:Q8_0")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="no such file, and the hub does not tell its files: no network"):
        open_checkpoint("owner/name-GGUF:Q4_0")


def test_a_split_file_answers_as_the_whole_one(hub, files):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = []
    for model in (str(files[""]), "owner/name-GGUF:BF16"):
        with LLM(model, **EXACT) as llm:
            answers.append(llm.generate(["Hello", [1, 2, 3]], params, use_tqdm=False))
    assert answers[0] == answers[1]


@pytest.fixture
def parts(files, tmp_path) -> list[Path]:
    return sorted(Path(shutil.copy(file, tmp_path)) for name, file in files.items() if name)


def test_all_parts_are_read_together(files, parts):
    expected = {tensor.name: tensor[:] for tensor in open_checkpoint(files[""]).tensors()}
    found = {tensor.name: tensor[:] for tensor in open_checkpoint(parts[0]).tensors()}
    assert len(parts) == 3 and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


DAMAGES = {
    "another part is named": (
        lambda parts: parts[1],
        r"is one of 3 parts; name the first, \.\.\.-00001-of-00003\.gguf",
    ),
    "another name": (lambda parts: parts[0].rename(parts[0].with_name("a.gguf")), "is one of 3 parts"),
    "a part is missing": (lambda parts: parts[2].unlink(), "00003-of-00003.gguf is missing"),
    "a part stands in for another": (
        lambda parts: shutil.copy(parts[1], parts[2]) and None,
        "00003-of-00003.gguf is not its part 3",
    ),
    "a part is cut": (lambda parts: parts[2].write_bytes(parts[2].read_bytes()[:-99]) and None, "ends after"),
    "another count": (
        lambda parts: change(parts[0], b"split.tensors.count\x05\0\0\0"),
        "3 parts have .* tensors, which is not what it says",
    ),
}


def change(file: Path, key: bytes) -> None:
    """Another value of four bytes behind this key and its type."""
    data = bytearray(file.read_bytes())
    end = data.index(key) + len(key)
    data[end] += 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_that_do_not_fit_are_refused_by_name(parts, damage):
    spoil, problem = DAMAGES[damage]
    with pytest.raises(ValueError, match=problem):
        open_checkpoint(spoil(parts) or parts[0])
