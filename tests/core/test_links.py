"""Every file that a page of the documentation links to, results above all, is in the repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("*.md", "docs/*.md", "kernels/*.md", "examples/**/*.md")
PAGES = sorted({page for folder in FOLDERS for page in ROOT.glob(folder)})
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not missing


def test_links_are_found():
    found = [link for page in PAGES for link in LINK.findall(page.read_text(encoding="utf-8"))]
    assert sum("benchmarks/results/" in link for link in found) > 40 and len(PAGES) > 8
