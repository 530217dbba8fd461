"""docs/measurements/compatibility.md: which models there are, what became of each; people and a test read it."""

import re
from collections import Counter
from pathlib import Path

from support.compatibility.comparison import Row

FILE = Path(__file__).parents[3] / "docs" / "measurements" / "compatibility.md"
AGAIN = "run `make compatibility`, and read the difference in docs/measurements/compatibility.md"
HEADINGS = {
    "language": "Language models of transformers",
    "image-text": "Image-text models of transformers",
    "diffusion": "Models of diffusers",
}
COLUMNS = ("model", "class", "outcome", "what is fast", "what is not, and why")
INTRODUCTION = """# Compatibility

Every causal language model and image-text model of transformers and every model class of diffusers, each built tiny
with random weights, run stock, optimized and restored on a CPU in fp32. In all of them `optimize` and the calls after
it raise nothing that stock does not, the results are those of stock, and after `restore` they are so to the bit.

| outcome | |
|---|---|
| fused | the language model as a whole; of other models, blocks |
| parts | norms and other single layers |
| graph | stock code, which a GPU replays as a CUDA graph |
| stock | nothing is changed |
| not built | stock runs no call of it on this machine, or not in this size; the reason is its error |

What an image-text model is given here is text alone. `make compatibility` writes this file; nobody edits it by hand.
"""


def models() -> dict[str, list[str]]:
    """The models there are, by section, without importing one: model types, or classes without one, and of diffusers
    the names of classes."""
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    language, images = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    mapped = {name for names in (*language.values(), *images.values()) for name in names_of(names)}
    rest = {name for name in dir(transformers) if name.endswith("ForCausalLM")} - mapped - {"AutoModelForCausalLM"}
    images = [kind for kind in images if kind not in language or language[kind] != images[kind]]
    return {
        "language": sorted([*language, *rest]),
        "image-text": sorted(images),
        "diffusion": sorted(diffusion_classes()),
    }


def names_of(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def diffusion_classes() -> dict[str, str]:
    """The module each model class of diffusers stands in, read from its source."""
    import diffusers

    folder = Path(diffusers.__file__).parent
    bases, modules = {}, {}
    for file in (folder / "models").rglob("*.py"):
        for name, parents in re.findall(r"^class (\w+)\(([^)]*)\)", file.read_text(encoding="utf-8"), re.MULTILINE):
            bases[name] = set(re.findall(r"\w+", parents))
            modules[name] = ".".join(("diffusers", *file.relative_to(folder).with_suffix("").parts))
    found = {"ModelMixin"}
    while new := {name for name, parents in bases.items() if parents & found} - found:
        found |= new
    return {name: modules[name] for name in found - {"ModelMixin", "LegacyModelMixin"}}


def versions() -> dict[str, str]:
    import diffusers
    import transformers

    return {"transformers": transformers.__version__, "diffusers": diffusers.__version__}


def write(table: dict[str, list[Row]]) -> None:
    counts = Counter(row.outcome for rows in table.values() for row in rows)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    lines = [INTRODUCTION, "Written with " + ", ".join(f"{name} {version}" for name, version in versions().items())]
    lines[-1] += f": {told}."
    for section, rows in table.items():
        lines += ["", f"## {HEADINGS[section]}", "", cells(COLUMNS), cells(["---"] * len(COLUMNS))]
        lines += [cells((row.model, row.kind, row.outcome, row.fast, row.why)) for row in rows]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def cells(texts) -> str:
    return "| " + " | ".join(texts) + " |"


def read() -> tuple[dict[str, str], dict[str, list[Row]]]:
    """The versions the file was written with, and its rows by section."""
    text = FILE.read_text(encoding="utf-8")
    header = text.partition("Written with")[2].partition("\n")[0]
    written = dict(re.findall(r"(transformers|diffusers) (\d[\w.]*\w)", header))
    table = {}
    for section, heading in HEADINGS.items():
        body = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        rows = [line[2:-2].split(" | ") for line in body.splitlines() if line.startswith("| ")]
        table[section] = [Row(*(cell.strip() for cell in row)) for row in rows[2:]]
    return written, table
