"""Lets a page of the site link to any file of the repository, by the same relative link that works in a checkout.

README.md, CHANGELOG.md and the like become pages; other files that a page links to, such as raw results, are copied.
"""

import ast
import os.path
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
OPS = "<!-- every op -->"  # in a page: the place of the operations' documentation
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "kernels/README.md": "kernels.md",
}
SOURCES = {uri: path for path, uri in PAGES.items()}


def on_files(files, config):
    """Adds the pages above, and every file outside docs/ that a page links to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + list(PAGES)
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, uri_of(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            links = {target(path, link) for link in LINK.findall((ROOT / path).read_text(encoding="utf-8"))}
            new = sorted(link for link in links if link and not link.startswith("docs/") and link not in seen)
            waiting += new
            seen.update(new)
    return files


def on_page_markdown(markdown, page, config, files):
    """Links between files of the repository become links between files of the site."""
    uri = page.file.src_uri
    path = SOURCES.get(uri) or (uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}")

    def rewritten(match):
        to = target(path, match[1])
        return match[1] if to is None else posixpath.relpath(uri_of(to), posixpath.dirname(uri) or ".")

    return LINK.sub(rewritten, markdown).replace(OPS, ops())


def target(path: str, link: str) -> str | None:
    """The file a link leads to, from the root of the repository: a folder's README.md. None where there is none."""
    to = os.path.normpath(ROOT / path / ".." / link)
    to = os.path.join(to, "README.md") if os.path.isdir(to) else to
    return Path(to).relative_to(ROOT).as_posix() if os.path.isfile(to) else None


def uri_of(path: str) -> str:
    """Where a file of the repository is in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path, f"repository/{path}")


def ops() -> str:
    """mkdocstrings' directives for every op, which are the lower-case names of accel_kernels, read without torch."""
    body = ast.parse((ROOT / "kernels/accel_kernels/__init__.py").read_text(encoding="utf-8")).body
    modules = {name.name: node.module for node in body if isinstance(node, ast.ImportFrom) for name in node.names}
    names = [
        name
        for one in body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"
        for name in ast.literal_eval(one.value)
        if name.islower()
    ]
    options = "    options: {members: [reference], show_root_heading: false, show_root_toc_entry: false}"
    return "\n".join(f"## {name}\n\n::: {modules[name]}\n{options}\n" for name in sorted(names))
