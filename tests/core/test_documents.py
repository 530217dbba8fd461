"""The documentation stays short and can be followed: how many words, how long a sentence, and where the walks lead."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOST_WORDS = {"README.md": 700, "docs": 9000}  # of docs without measurements/
MOST_LINES_OF_GLOSSARY = 60
MOST_STOPS = 15
MOST_WORDS_OF_SENTENCE = 30

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "measurements" not in page.parts]
NOTATION = re.compile(r"^```[\s\S]*?^```|^#+ .*$|^:::.*(?:\n .*)*|<!--.*?-->|!\[[^]]*\]\([^)]*\)", re.M)


def sentences(page: Path) -> list[str]:
    """What a page says, sentence by sentence; the cells of tables and the items of lists are sentences too."""
    text = NOTATION.sub("\n\n", page.read_text(encoding="utf-8"))
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) ?)|\|", text)
    return [one for part in parts for one in re.split(r"(?<=[.!?])[*)]*\s+", part.strip()) if one]


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def test_the_documentation_is_short():
    assert words(ROOT / "README.md") <= MOST_WORDS["README.md"]
    assert sum(map(words, PAGES)) <= MOST_WORDS["docs"], {page.name: words(page) for page in PAGES}
    assert len((DOCS / "glossary.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_GLOSSARY


def test_sentences_are_short():
    found = [one for page in (ROOT / "README.md", *PAGES) for one in sentences(page)]
    assert len(found) > 500
    assert [one for one in found if len(re.findall(r"\w[\w'.-]*", one)) > MOST_WORDS_OF_SENTENCE] == []


def test_guides_name_no_commit():
    assert [page for page in (DOCS / "guides").glob("*.md") if re.search(r"\b[0-9a-f]{7}\b", page.read_text())] == []


def test_walks_are_short_and_lead_through_files_that_are_there():
    page = (DOCS / "design.md").read_text(encoding="utf-8").split("\n## Walks\n")[1].split("\n## ")[0]
    walks = [re.findall(r"^\d+\. `([^`]+)`: .+\.$", walk, re.M) for walk in page.split("\n### ")[1:]]
    assert len(walks) == 3
    for stops in walks:
        assert 5 <= len(set(stops)) == len(stops) <= MOST_STOPS, stops
        assert [stop for stop in stops if not (ROOT / stop).is_file()] == []


def test_words_of_the_glossary_name_files_that_are_there():
    tops = (ROOT / "accel", ROOT / "kernels")
    told = re.findall(r"\(`([^`]+)`\)", (DOCS / "glossary.md").read_text(encoding="utf-8"))
    assert len(told) > 20 and [path for path in told if not any((top / path).exists() for top in tops)] == []
