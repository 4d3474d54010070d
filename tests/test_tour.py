"""The tour: its code is that of the source, its pictures are there, and its contents list every chapter."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs" / "tour"
CHAPTERS = sorted(TOUR.glob("[0-9]_*.md"))
MOST_BYTES = 150_000
QUOTE = r"^```python\n# (nanovllm/\S+\.py)\n(.*?)^```$"


def quotes_of(chapter: Path) -> list[tuple[str, str]]:
    """Files and what is quoted from them."""
    return re.findall(QUOTE, chapter.read_text(), re.MULTILINE | re.DOTALL)


def is_quoted_from(source: str, quote: str) -> bool:
    """
    Whether the lines follow each other in the source, all indented by some number of spaces more. A line
    `...` stands for lines that are left out, and blank lines do not count.
    """
    lines = [line for line in source.splitlines() if line]
    pieces = [
        [line for line in piece.splitlines() if line]
        for piece in re.split(r"^ *\.\.\.$", quote, flags=re.MULTILINE)
    ]
    for indent in range(0, 24, 4):
        start = 0
        for piece in pieces:
            wanted = [" " * indent + line for line in piece]
            places = range(start, len(lines) - len(wanted) + 1)
            found = next((i for i in places if lines[i : i + len(wanted)] == wanted), None)
            if found is None:
                break
            start = found + len(wanted)
        else:
            return True
    return False


def test_there_are_eight_chapters_and_the_contents_link_to_each():
    links = re.findall(r"\]\((\S+?\.md)\)", (TOUR / "README.md").read_text())
    chapters = [link for link in links if "/" not in link]
    assert chapters == [chapter.name for chapter in CHAPTERS]
    assert [name[0] for name in chapters] == list("12345678")


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_the_code_of_a_chapter_is_that_of_the_source(chapter):
    quotes = quotes_of(chapter)
    assert quotes
    for file, quote in quotes:
        assert quote.count("\n") <= 16, "a chapter quotes the lines that matter"
        assert is_quoted_from((ROOT / file).read_text(), quote), f"not in {file} any more:\n{quote}"


def test_a_quote_that_has_drifted_is_noticed():
    source = "class A:\n    def f(self):\n        first()\n        second()\n        third()\n"
    assert is_quoted_from(source, "first()\nsecond()\n")
    assert is_quoted_from(source, "def f(self):\n    first()\n    ...\n    third()\n")
    assert not is_quoted_from(source, "first()\nthird()\n")
    assert not is_quoted_from(source, "second()\n...\nfirst()\n")
    assert not is_quoted_from(source, "def f(self):\nfirst()\n")
    assert not is_quoted_from(source, "first()\nsecond\n")


@pytest.mark.parametrize("page", [TOUR / "README.md", *CHAPTERS], ids=lambda page: page.stem)
def test_every_page_has_a_picture_of_at_most_150_kilobytes(page):
    pictures = re.findall(r"!\[[^\]]+\]\((\S+\.png)\)", page.read_text())
    assert pictures
    for picture in pictures:
        assert (TOUR / picture).read_bytes().startswith(b"\x89PNG")
        assert (TOUR / picture).stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("page", [TOUR / "README.md", *CHAPTERS], ids=lambda page: page.stem)
def test_every_link_leads_to_a_file_and_every_chapter_has_an_exercise(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (TOUR / link).exists(), link
    for name in re.findall(
        r"`((?:nanovllm|engine|layers|models|distributed|kernels)/\S+\.py|llm\.py)`", text
    ):
        assert (ROOT / name).exists() or (ROOT / "nanovllm" / name).exists(), name
    if page in CHAPTERS:
        assert "\n## Exercise\n" in text and "\n## What it costs and gains\n" in text


def test_every_picture_can_be_made_again():
    """Each is saved by a function of pictures.py, which is in its list."""
    script = (TOUR / "pictures.py").read_text()
    made = re.findall(r'save(?:_figure)?\(.*"(\w+)"\)$', script, re.MULTILINE)
    assert sorted(made) == sorted(path.stem for path in TOUR.glob("*.png"))
    assert len(re.search(r"^PICTURES = \[(.*)\]$", script, re.MULTILINE)[1].split(", ")) == len(made)
