"""Loads what was saved with save_pretrained, whatever it is: a pipeline, a diffusers model, a transformers model.

Weights are read from safetensors alone: a pickle may run any code when it is read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.errors import fatal
from accel.libraries.diffusion import CLASS, file_of_pipelines

INDEX = "model_index.json"  # of a pipeline
PICKLES = ("pytorch_model*.bin*", "diffusion_pytorch_model*.bin*")  # of transformers and of diffusers, in shards too
NAMED = 3  # weights in a message


def load_saved(folder: Path, dtype: str | torch.dtype, device: torch.device) -> Any:
    """The object of this folder, on the device. Raises ValueError where the folder holds none, pickles alone, or
    weights that are not those of the model; see `check_keys`.
    """
    refuse_pickles(folder)
    if (folder / INDEX).is_file():
        from diffusers import DiffusionPipeline

        models = _models(folder, dtype)
        return DiffusionPipeline.from_pretrained(folder, dtype=dtype, use_safetensors=True, **models).to(device)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has neither a {INDEX} nor a config.json")
    config = read_json(folder / "config.json")
    if CLASS in config:
        import diffusers

        model = getattr(diffusers, config[CLASS], None)
        if model is None:
            raise ValueError(f"{folder} is a {config[CLASS]}, which this diffusers does not know")
    else:
        import transformers

        names = config.get("architectures") or []
        model = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
        if model is None:
            raise ValueError(
                f"{folder}/config.json names neither a diffusers class nor an architecture of transformers"
            )
    return whole(model, folder, dtype=dtype).to(device).eval()


def whole(kind: Any, folder: Path, **given: Any) -> nn.Module:
    """kind.from_pretrained(folder), from safetensors. Raises ValueError for weights that are not those of the model,
    and for settings of which none can be made.
    """
    given |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with readable(folder):
        model, found = kind.from_pretrained(folder, **given)
    check_keys(folder, model, found)
    return model


def check_keys(folder: Path, model: nn.Module, found: Mapping) -> None:
    """Raises ValueError, naming them, where the files lack weights of the model, hold others, or such of other shapes.

    found: what `from_pretrained` tells of the loading; tied weights, and keys that a class says may be missing or left
    over, are not among it. A buffer that the model makes by itself may be left over too: older versions saved it.
    """
    own = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
    more = [key for key in found["unexpected_keys"] if not any(_same_end(key, name) for name in own)]
    if missing := found["missing_keys"]:
        raise ValueError(f"{folder} lacks {_few(missing)}, which the model needs")
    if more:
        raise ValueError(f"{folder} holds {_few(more)}, for which its config.json has no place")
    shapes = ((name, tuple(file), tuple(own)) for name, file, own in found["mismatched_keys"])
    if other := [f"{name} is {file} in the file and {own} in the model" for name, file, own in shapes]:
        raise ValueError(f"{folder}: {_few(other)}")


def _same_end(key: str, name: str) -> bool:
    """Whether one is the other with more in front: a model inside another, or taken out of it."""
    return f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")


def _few(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _models(folder: Path, dtype: str | torch.dtype) -> dict[str, nn.Module]:
    """The models of a pipeline by name, of those classes that can be found; the pipeline loads the rest by itself."""
    models = {}
    for name, said in read_json(folder / INDEX).items():
        kind = _class(*said) if isinstance(said, list) and len(said) == 2 and all(said) else None
        if kind is not None and (folder / name / "config.json").is_file():
            models[name] = whole(kind, folder / name, dtype=dtype)
    return models


def _class(library: str, name: str) -> type | None:
    """A class of models of diffusers or transformers, or of a pipeline of diffusers."""
    if not isinstance(library, str) or not isinstance(name, str):
        return None
    known = library in ("diffusers", "transformers")
    kind = getattr(import_module(library) if known else file_of_pipelines(library), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, nn.Module) else None


def read_json(file: Path) -> dict:
    """The object in a file. Raises ValueError, naming it, where it holds none."""
    try:
        found = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it holds no object")
    return found


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Inside, what is raised of files that make no model is a ValueError that names them, and the setting of
    config.json without which there would be one. Short memory and a GPU that failed are raised as they are.
    """
    try:
        yield
    except Exception as error:  # classes of models and configurations raise whatever nonsense leads them to
        if fatal(error) or (isinstance(error, ValueError) and str(folder) in str(error)):
            raise
        raise ValueError(f"{_at_fault(folder)}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The first line of what it says, with its kind where that says nothing by itself."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, ValueError | RuntimeError) and line else f"{type(error).__name__}: {line}"


def _at_fault(folder: Path) -> str:
    """The configuration and the setting without which a model can be made, where it is a setting; else the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    file = folder / "config.json"

    def makes(settings: dict) -> bool:
        try:
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
        except Exception as error:
            if fatal(error):
                raise
            return False
        return True

    try:
        said = {name: value for name, value in read_json(file).items() if name != "quantization_config"}
    except (OSError, ValueError):
        return str(folder)
    if "model_type" not in said or makes(said):
        return str(folder)
    others = (name for name in said if name not in ("model_type", "architectures"))
    name = next((one for one in others if makes({n: value for n, value in said.items() if n != one})), None)
    return str(file) if name is None else f"{file}: {name} is {said[name]!r}"


def refuse_pickles(folder: Path) -> None:
    """Raises ValueError where all weights of a model, or of a model of a pipeline, are pickles."""
    for part in sorted(folder.iterdir()) if (folder / INDEX).is_file() else [folder]:
        pickles = sorted(path for name in PICKLES for path in part.glob(name))
        if pickles and not any(part.glob("*.safetensors")):
            raise ValueError(
                f"{pickles[0]} is a pickle, which may run any code when it is read, so it is not; safetensors are "
                "wanted: load it with from_pretrained, if you trust the file, and save it with save_pretrained"
            )


def without_values(folder: Path) -> dict[str, nn.Module]:
    """Its models by name, without values; of a single one, by "". Raises ValueError as `load_saved`."""
    if (folder / INDEX).is_file():
        said = read_json(folder / INDEX).items()
        kinds = {name: _class(*one) for name, one in said if isinstance(one, list) and len(one) == 2 and all(one)}
        return {name: _empty(kind, folder / name) for name, kind in kinds.items() if kind is not None}
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    library = "diffusers" if CLASS in config else "transformers"
    names = [config[CLASS]] if CLASS in config else config.get("architectures") or []
    kind = next((found for name in names if (found := _class(library, name)) is not None), None)
    if kind is None:
        raise ValueError(f"{folder} has neither a {INDEX} nor a config.json of a known model")
    return {"": _empty(kind, folder, as_stored=True)}


def _empty(kind: Any, folder: Path, as_stored: bool = False) -> nn.Module:
    """In bfloat16, as pipelines are loaded; as_stored: in the dtype that a configuration of transformers names."""
    with readable(folder), torch.device("meta"):
        if hasattr(kind, "load_config"):
            return kind.from_config(kind.load_config(folder)).to(torch.bfloat16)
        config = kind.config_class.from_pretrained(folder)
        return kind(config).to((as_stored and config.dtype) or torch.bfloat16)
