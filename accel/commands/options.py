"""What several commands take: a device, a dtype, a folder with a saved model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import torch

DEVICE_HELP = "cuda, cuda:1, cpu ...; a GPU if there is one"
DTYPE_HELP = "fp16, bf16 or fp32; fp16 on a GPU, fp32 elsewhere"
JSON_HELP = "print JSON instead of tables"


def parse_folder(folder: Path) -> Path:
    """Asked before anything is loaded, which takes seconds."""
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not a folder", param_hint="FOLDER")
    return folder


def parse_device(name: str | None) -> "torch.device":
    """The device of this name, a GPU without one if there is any. Raises BadParameter."""
    import torch

    with user_errors("--device", RuntimeError, AssertionError):
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    return device


def parse_dtype(name: str | None, device: "torch.device") -> "torch.dtype":
    """The dtype of this name, or the usual one of the device. Raises BadParameter."""
    import torch

    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    name = name or ("fp16" if device.type == "cuda" else "fp32")
    if name not in dtypes:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(dtypes)}", param_hint="--dtype")
    return dtypes[name]


def quiet() -> None:
    """Hugging Face's loading bars would run across ours, and its hints are not about us; this process is ours alone."""
    for library in ("diffusers", "transformers"):
        if find_spec(library) is not None:
            logging = import_module(f"{library}.utils.logging")
            logging.disable_progress_bar()
            logging.set_verbosity_error()


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer's files; without them transformers would make an empty one."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def quantized(folder: Path) -> bool:
    """Whether a model of the layout of compressed-tensors is saved there."""
    try:
        said = json.loads((folder / "config.json").read_text()).get("quantization_config")
        return said is not None and said.get("quant_method") == "compressed-tensors"
    except (OSError, ValueError, AttributeError):
        return False


def load_folder(folder: Path, dtype: "str | torch.dtype", device: "torch.device") -> Any:
    """What was saved there, on the device, its own progress bars off; a wrong folder is the user's mistake."""
    import accel
    from accel import saved
    from accel.llm.shards.manifest import is_divided

    parse_folder(folder)
    quiet()
    ours = quantized(folder) or is_divided(folder)
    with user_errors():
        loaded = accel.load(folder, dtype, device) if ours else saved.load_saved(folder, dtype, device)
    if hasattr(loaded, "set_progress_bar_config"):
        loaded.set_progress_bar_config(disable=True)
    return loaded


@contextmanager
def user_errors(option: str | None = "FOLDER", *kinds: type[Exception]) -> Iterator[None]:
    """Inside, errors of these kinds are told as the user's: of what was given for the option."""
    expected = kinds or (TypeError, ValueError, OSError)
    try:
        yield
    except expected as error:
        raise wrong_folder(error, option) from None


def wrong_folder(error: Exception, option: str | None = "FOLDER") -> typer.BadParameter:
    """To be raised for a folder that cannot be read."""
    return typer.BadParameter(str(error).split("\n")[0], param_hint=option)
