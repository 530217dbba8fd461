"""The documentation holds together and stays short.

Links and anchors lead somewhere, nothing public is left out, sentences are short, walks name what is there.
"""

import re
from dataclasses import fields
from pathlib import Path

import accel_kernels
import accel_kernels.tolerances
import pytest
import torch

import accel
from accel import tolerances
from accel.tolerances import bound

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("*.md", "docs/**/*.md", "kernels/*.md", "examples/**/*.md")
PAGES = sorted({page for folder in FOLDERS for page in ROOT.glob(folder)})
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)

READ = [page for page in sorted(DOCS.rglob("*.md")) if "measurements" not in page.parts]  # what is to be short
MOST_WORDS, MOST_WORDS_OF_README = 9000, 700
MOST_LINES_OF_GLOSSARY = 60
MOST_WORDS_OF_SENTENCE = 30
MOST_STOPS = 15  # of a walk
BESIDES = re.compile(r"^#+ .*$|^:::.*(?:\n .*)*|!\[[^]]*\]\([^)]*\)", re.M)  # what is no sentence


def text(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What headings are called in links, by the rule of Markdown's toc extension, which GitHub's is like."""
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in HEADING.findall(text(page)))
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.share(1)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    wrong = []
    for link, anchor in LINK.findall(text(page)):
        to = page.parent / link if link else page
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            wrong.append(f"{link}#{anchor}")
    assert not wrong


def test_links_are_found():
    found = [link for page in PAGES for link, _ in LINK.findall(page.read_text(encoding="utf-8"))]
    assert sum("benchmarks/results/" in link for link in found) > 40 and len(PAGES) > 15


WRITTEN = re.compile(r"`([\w-][\w.-]*/[\w./-]*(?:\.py|\.md|/))`")
TOPS = [ROOT / folder for folder in ("", "accel", "kernels", "kernels/accel_kernels", "tests", "docs")]


def test_files_that_pages_name_are_there():
    told = {path for page in PAGES if page.name != "CHANGELOG.md" for path in WRITTEN.findall(text(page))}
    assert len(told) > 40 and [path for path in told if not any((top / path).exists() for top in TOPS)] == []


def test_every_page_is_on_the_site():
    """`make docs` asks the same and more; this needs no mkdocs."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = set(re.findall(r": (\S+\.md)$", nav, re.M))
    here = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert listed == here | {"index.md", "kernels.md", "contributing.md", "changelog.md"}


def test_the_reference_tells_of_all_that_is_public():
    page = (DOCS / "reference" / "accel.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^::: accel\.[\w.]*\b(\w+)$", page, re.M))
    assert told == set(accel.__all__) - {"__version__"}
    assert [field.name for field in fields(accel.Options) if f"| `{field.name}` |" not in page] == []


def test_every_op_is_in_the_list_of_kernels():
    page = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    assert [op.name for op in accel_kernels.OPS if f"| `{op.name}` |" not in page] == []


def test_the_design_tells_of_every_room():
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    tops = (ROOT / "accel", ROOT / "kernels" / "accel_kernels")
    rooms = [file.parent.relative_to(top).as_posix() + "/" for top in tops for file in top.glob("*/**/__init__.py")]
    assert [room for room in rooms if f"`{room}`" not in page] == []


def sentences(page: Path) -> list[str]:
    """What a page says; cells of tables and items of lists are sentences too."""
    plain = re.sub(r"<!--.*?-->", "", BESIDES.sub("\n\n", text(page)))
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", plain))
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) ?)|\|", plain)
    return [one for part in parts for one in re.split(r"(?<=[.!?])[*)]*\s+", part.strip()) if one]


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def test_the_documentation_is_short():
    assert words(ROOT / "README.md") <= MOST_WORDS_OF_README
    assert sum(map(words, READ)) <= MOST_WORDS, {page.name: words(page) for page in READ}
    assert len((DOCS / "glossary.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_GLOSSARY


def test_sentences_are_short():
    found = [one for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *READ) for one in sentences(page)]
    assert len(found) > 500
    assert [one for one in found if len(re.findall(r"\w[\w'.-]*", one)) > MOST_WORDS_OF_SENTENCE] == []


def test_guides_name_no_commit():
    guides = {page.name: page.read_text(encoding="utf-8") for page in (DOCS / "guides").glob("*.md")}
    assert guides and [name for name, page in guides.items() if re.search(r"\b(?=\w*\d)[0-9a-f]{7}\b", page)] == []


def test_walks_are_short_and_lead_through_what_is_there():
    page = (DOCS / "design.md").read_text(encoding="utf-8").split("\n## Walks\n")[1].split("\n## ")[0]
    walks = [re.findall(r"^\d+\. `([^`]+)`: (.+)$", walk, re.M) for walk in page.split("\n### ")[1:]]
    assert len(walks) == 3
    for stops in walks:
        assert 5 <= len(stops) <= MOST_STOPS and len({file for file, _ in stops}) == len(stops)
        for file, sentence in stops:
            named = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", sentence)}
            there = re.findall(r"^\s*(?:def|class) (\w+)|^(\w+) = ", (ROOT / file).read_text(encoding="utf-8"), re.M)
            assert named & {name for pair in there for name in pair if name}, f"{file} has none of {named}"


def test_words_of_the_glossary_name_files_that_are_there():
    tops = (ROOT / "accel", ROOT / "kernels")
    told = re.findall(r"\(`([^`]+)`\)", (DOCS / "glossary.md").read_text(encoding="utf-8"))
    assert len(told) > 20 and [path for path in told if not any((top / path).exists() for top in tops)] == []


BOUNDS = [Path(module.__file__) for module in (tolerances, accel_kernels.tolerances)]
BARE = re.compile(
    r"(?<![\w=])[<>]=? *(\d[\d.]*e-\d|\d*\.?\d+ *\* *\w+\.(abs|median))|[ar]tol=\d"
    r"|^[A-Z_]*(LIMIT|TOLERANCE|BOUND|FLOOR)S? *= *(\d+\.\d|\d+e-|\{)"
)


def bare(text: str) -> list[str]:
    """Lines that compare with a number of their own."""
    return [line.strip() for line in text.splitlines() if BARE.search(line)]


PLANTED = """
ok = error <= 1e-4
torch.allclose(a, b, atol=1e-6)
LIMITS = {torch.float16: 2e-2}
return off <= 0.02 * wanted.abs().max()
FLOOR = {torch.float32: 4e-6}
TOLERANCE = 0.5
"""
OF_OTHER_KINDS = """
x = 1e-5
if best < 0.9 * own:
SIZE_LIMIT = 16384
"""


def test_no_bound_stands_elsewhere():
    assert len(bare(PLANTED)) == 6 and not bare(OF_OTHER_KINDS)
    paths = [path for file in BOUNDS for path in file.parent.rglob("*.py") if path not in BOUNDS]
    assert not {str(path): found for path in paths if (found := bare(path.read_text()))}


@pytest.mark.parametrize("name", ["BLOCK", "FORMULA", "LOGITS"])
def test_tables_are_a_few_roundings_of_the_dtype(name):
    table = getattr(tolerances, name)
    for dtype in (torch.float16, torch.bfloat16):
        assert 1 <= bound(table, dtype) / torch.finfo(dtype).eps <= 21, dtype
    assert bound(table, torch.float32) < bound(table, torch.float16) < bound(table, torch.bfloat16)
    assert bound(table, torch.float8_e4m3fn) == table[None]


def test_a_wrong_factor_is_more_than_any_bound_of_a_formula():
    assert max(tolerances.FORMULA.values()) < 0.01 and tolerances.PREQUANTIZED < 0.3
    assert tolerances.ACTIVATION < 5e-4 and tolerances.NORM < tolerances.NORM_NARROW
