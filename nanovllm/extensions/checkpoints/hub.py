"""Checkpoints on the Hugging Face hub: downloads the files that are needed, unless they are in its cache.

`owner/name` is a folder; a GGUF file in such a repository is `owner/name:Q4_K_M`, by the kind of quantisation
that its name ends with, or `owner/name/file.gguf`.
"""

import glob
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanovllm.checkpoints.folder import INDEX, SafetensorsTensor, read_index
from nanovllm.extensions.checkpoints import pickled
from nanovllm.extensions.checkpoints.library_errors import library_errors
from nanovllm.extensions.checkpoints.made_up import SHAPES
from nanovllm.extensions.checkpoints.untrusted import OTHER_COPY, file_inside

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_GGUF = re.compile(rf"({HUB_ID.pattern})(?::([\w.-]+)|/(.+\.gguf))", re.IGNORECASE)
HUB_FILES = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
CONFIGS = ("config.json", "generation_config.json", "hf_quant_config.json")
PART = re.compile(r"-\d{5}(-of-\d{5}\.gguf)", re.IGNORECASE)  # the end of a name, of a part of a split file
# What names a model besides ids of the hub.
OTHER_NAMES = f", a .gguf file, 'smollm2' or, with load_format='dummy', one of {[*SHAPES]}"


def download(name: str, weights: bool, files: Collection[str] = HUB_FILES, **options: Any) -> str:
    """
    The local folder of a hub id, with these files and perhaps weights, or the local file of a GGUF file
    there, from the cache or the network. `options` are those of `snapshot_download`. Raises ValueError.
    """
    if HUB_GGUF.fullmatch(name):
        return _download_gguf(name, options)
    folder = fetch(name, files, options, others=OTHER_NAMES)
    if not weights:
        return folder
    path = Path(folder)
    if (path / INDEX).exists():
        file_inside(path, INDEX)
    listed = [glob.escape(file) for file in read_index(path)] or ["*.safetensors"]
    fetch(name, [*files, *listed], options)
    if not any(path.glob("*.safetensors")):
        _refuse_gguf_alone(name, options)
        fetch(name, [*files, *pickled.NAMES], options)
    return folder


def read_headers(name: str) -> list[SafetensorsTensor]:
    """
    The tensors of a hub id, to ask for their shapes and dtypes; none if the hub cannot say. Raises ValueError
    if it has GGUF files alone.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError

    found = {}
    try:
        found = HfApi().get_safetensors_metadata(name).files_metadata
    except NotASafetensorsRepoError:
        _refuse_gguf_alone(name, {})
    except Exception:  # no network, unknown or private
        pass
    return [
        SafetensorsTensor(file, name, SimpleNamespace(get_shape=info.shape.copy, get_dtype=info.dtype.strip))
        for file, header in found.items()
        for name, info in header.tensors.items()
    ]


def _refuse_gguf_alone(name: str, options: dict[str, Any]) -> None:
    """Of a repository without safetensors."""
    if files := _list_gguf(name, options):
        raise ValueError(
            f"model {name!r} has no safetensors file on the hub, but it has GGUF files; name one, as in "
            f"{name + ':Q4_K_M'!r} or {name + '/' + min(files)!r}: {', '.join(files)}"
        )


def _download_gguf(name: str, options: dict[str, Any]) -> str:
    """The first part of a file, whose other parts are beside it."""
    hub_id, kind, file = HUB_GGUF.fullmatch(name).groups()
    files = _list_gguf(name, options)
    wanted = rf"(.*[-._/])?{re.escape(kind)}(-\d+-of-\d+)?\.gguf" if kind else re.escape(file)
    fitting = [each for each in files if re.fullmatch(wanted, each, re.IGNORECASE)]
    if len(fitting) != 1:
        others = f"the hub has these: {', '.join(files) or 'none'}"
        problem = f"several fit: {', '.join(fitting)}" if fitting else others
        raise ValueError(f"model {name!r}: there is no such file, and of {hub_id} {problem}")
    folder = fetch(hub_id, map(glob.escape, files[fitting[0]]), options, ignored=())
    return str(Path(folder, fitting[0]))


def _list_gguf(name: str, options: dict[str, Any]) -> dict[str, list[str]]:
    """The GGUF files of language models in a repository, each by its first part, and all their parts."""
    from huggingface_hub import HfApi, snapshot_download

    hub_id = HUB_ID.match(name)[0]
    try:
        listed = HfApi(token=options.get("token")).list_repo_files(hub_id, revision=options.get("revision"))
    except Exception as error:  # unknown, private or gated; or no network
        missing = f"model {name!r}: there is no such file"
        with library_errors(f"{missing}, and the hub does not tell its files: {error}"):
            folder = Path(snapshot_download(hub_id, local_files_only=True, **options))
        listed = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    files = {}
    for file in sorted(listed):
        # An "mmproj" is what makes embeddings of images.
        if file.lower().endswith(".gguf") and "mmproj" not in file and ".." not in file:
            files.setdefault(PART.sub(r"-00001\1", file), []).append(file)
    return files


def fetch(
    name: str,
    patterns: Iterable[str],
    options: dict[str, Any],
    what: str = "model",
    others: str = "",
    ignored: Collection[str] = ("*/*", OTHER_COPY),
) -> str:
    """
    The local folder of a hub id, with files of these patterns. Errors say what is missing and `others`, which
    names are known besides.
    """
    from huggingface_hub import snapshot_download

    missing = f"{what} {name!r}: there is no such folder"
    if not HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        raise ValueError(f"{missing}, and it is not a hub id ('owner/name'){others}")
    # Unknown, private or gated; no network and not in the cache; disk full.
    with library_errors(f"{missing}, and the hub does not give it"):
        return snapshot_download(name, allow_patterns=[*patterns], ignore_patterns=[*ignored], **options)
