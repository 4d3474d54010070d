"""README.md and docs/: links lead somewhere, and tables list what there is."""

import json
import re
import sys
import textwrap
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from nanovllm import SamplingParams
from nanovllm.assembly import MODELS
from nanovllm.config import Config
from nanovllm.extensions.models.known import gguf_models
from nanovllm.extensions.transformers.config import FIXED, REFUSED, REFUSED_FIELDS, VERIFIED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What tests/extensions/checkpoints/test_published.py compares with what the engine makes of each.
PUBLISHED = json.loads((ROOT / "tests/support/published_configs.json").read_text())["models"]
SIZES = r"^\| (\w+) \| .* \| ([\d,]+) \|$"  # in README.md: an extension, its tokens


def anchors(page: Path) -> set[str]:
    """Those that a page's headings have where it is shown."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_readme_says_how_large_extensions_are():
    """To a hundred tokens when `python tests/test_docs.py` wrote it, and never far off."""
    rows = dict(re.findall(SIZES, PAGES[0].read_text(), re.MULTILINE))
    told = {name: int(size.replace(",", "")) for name, size in rows.items()}
    for name, size in sizes().items():
        assert abs(told[name] - size) <= max(300, size // 10), f"{name} has {size} tokens"


def sizes() -> dict[str, int]:
    """Tokens of each extension's code."""
    from package_source import count_code, read_package

    found = Counter()
    for module in read_package(ROOT).values():
        _, *parts = module.name.split(".")
        if parts[:1] == ["extensions"] and len(parts) > 1:
            found[parts[1]] += count_code(module)[0]
    return found


def with_sizes(readme: str) -> str:
    """With the sizes as they are."""

    def row(match: re.Match) -> str:
        rounded = f"{round(sizes()[match[1]], -2):,}"
        return match[0].removesuffix(f"{match[2]} |") + f"{rounded} |"

    return re.sub(SIZES, row, readme, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_a_heading_of_it(page):
    links = re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text())
    for path, anchor in links:
        if path.startswith("https://"):
            continue
        target = (page.parent / path) if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_the_readme_leads_to_every_page():
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= set(
        re.findall(r"\((docs/[^)]*)\)", PAGES[0].read_text())
    )


@pytest.mark.parametrize(("page", "kind"), [("options.md", Config), ("requests.md", SamplingParams)])
def test_a_table_has_every_option_with_its_default(page, kind):
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|.*\|$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    told = {name: default.strip("`").strip('"') for name, default in rows}
    left_out = ("model", "hf_config", "eos")  # what is loaded, and what it fills in
    assert told == {field.name: str(field.default) for field in fields(kind) if field.name not in left_out}


def test_the_path_of_a_request_names_modules_that_there_are():
    [path] = re.findall(r"## The path of one request\n(.*?)\n## ", PAGES[0].read_text(), re.DOTALL)
    modules = re.findall(r"`(?:nanovllm/)?([\w/]+\.py|[a-z]+/)`", path)
    assert len(modules) > 15 and not [name for name in modules if not (ROOT / "nanovllm" / name).exists()]


def test_the_readme_has_every_extension():
    rows = re.findall(r"^\| (\w+) \| .* \| [\d,]+ \|$", PAGES[0].read_text(), re.MULTILINE)
    folders = (ROOT / "nanovllm/extensions").glob("*/__init__.py")
    assert sorted(rows) == sorted(file.parent.name for file in folders)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    named = re.findall(r"\b(?:tests|nanovllm)/[\w/]+\.py\b", page.read_text())
    assert not [name for name in named if not (ROOT / name).is_file()]


def models_page() -> str:
    """docs/models.md as it has to be. `python tests/test_docs.py` writes it."""

    def listed(names: list[str]) -> str:
        text = ", ".join(f"`{name}`" for name in sorted(names)) + "."
        return textwrap.fill(text, 120, break_on_hyphens=False)

    def row(name: str, entry: dict) -> str:
        by = f"`{entry.get('class')}` of {entry.get('by')}, {entry.get('weights')}"
        said = f"refused: {entry['refused']}" if "refused" in entry else by
        return f"| `{name}` | {entry['billions']:,} | {said} |"

    refused = "\n\n".join(f"Because {reason}: {listed(kinds)}" for reason, kinds in REFUSED.items())
    fields = "\n".join(
        f"- `{kind}` with `{field}`: {reason}." for (kind, field), reason in REFUSED_FIELDS.items()
    )
    fixed = "\n".join(
        f"- `{kind}` with others than "
        + ", ".join(f"`{each[0]}` {each[1]!r}" for each in values.items())
        + "."
        for kind, values in FIXED.items()
    )
    rows = "\n".join(row(name, entry) for name, entry in PUBLISHED.items())
    loaded = sum("refused" not in entry for entry in PUBLISHED.values())
    return f"""# What loads

This page is written by `python tests/test_docs.py`, and a test fails where it is not up to date.

`python -m nanovllm.extensions.checkpoints.support MODEL ...` says it of a folder, a `.gguf` file or a hub id,
without reading a weight: what it is, how its weights are kept, how much memory they and the KV cache take,
over how many ranks it can be split; or why the engine refuses it. Names, shapes and dtypes of all tensors are
compared with the model's.

## {len(PUBLISHED)} models that many use

By their published config.json in November 2026, {loaded} load. The second column has the billions of weights
in the part that reads text; the third has what builds the model, and the memory of its weights on a GPU.

| model | billions | |
|---|---|---|
{rows}

## Architectures with a class of their own

{listed(MODELS)}

## Model types through transformers

Their greedy tokens are those of transformers, as a test of each shows on a small random model. Those above
are built so with `model_impl="transformers"`.

{listed(VERIFIED)}

Some files of these types are refused, because of a field:

{fields}
{fixed}
- any with other `layer_types` than attention to all tokens or to a window, as mamba's of `granitemoehybrid`.

## Architectures of GGUF files

As `general.architecture` says it. OLMo 3 is `olmo2` there, Mistral, Mixtral and Falcon 3 are `llama`, and
DeepSeek-V3 is `deepseek2`. Experts stay packed.

{listed([model.gguf_name for model in gguf_models()])}

## Refused

{refused}

Of any other type no test shows that it is right. It is refused by its name, too.
"""


def test_the_page_of_models_lists_what_there_is():
    assert (ROOT / "docs/models.md").read_text() == models_page()


if __name__ == "__main__":
    sys.path.append(str(ROOT / "tests/support"))
    (ROOT / "docs/models.md").write_text(models_page())
    PAGES[0].write_text(with_sizes(PAGES[0].read_text()))
