"""Loads what was saved with save_pretrained, whatever it is: a pipeline, a diffusers model, a transformers model.

Weights are read from safetensors alone: a pickle may run any code when it is read.
"""

import json
from pathlib import Path

import torch

INDEX = "model_index.json"  # of a pipeline
PICKLES = ("pytorch_model*.bin*", "diffusion_pytorch_model*.bin*")  # of transformers and of diffusers, in shards too


def load(folder: Path, dtype: torch.dtype, device: torch.device):
    """The object of this folder, on the device. Raises ValueError where the folder holds none, or pickles alone."""
    refuse_pickles(folder)
    if (folder / INDEX).is_file():
        from diffusers import DiffusionPipeline

        return DiffusionPipeline.from_pretrained(folder, dtype=dtype, use_safetensors=True).to(device)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has neither a {INDEX} nor a config.json")
    config = json.loads((folder / "config.json").read_text())
    if "_class_name" in config:
        import diffusers

        model = getattr(diffusers, config["_class_name"], None)
        if model is None:
            raise ValueError(f"{folder} is a {config['_class_name']}, which this diffusers does not know")
        return model.from_pretrained(folder, dtype=dtype, use_safetensors=True).to(device).eval()
    import transformers

    names = config.get("architectures") or []
    model = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    if model is None:
        raise ValueError(f"{folder}/config.json names neither a diffusers class nor an architecture of transformers")
    return model.from_pretrained(folder, dtype=dtype, use_safetensors=True).to(device).eval()


def refuse_pickles(folder: Path) -> None:
    """Raises ValueError where all weights of a model, or of a model of a pipeline, are pickles."""
    for part in sorted(folder.iterdir()) if (folder / INDEX).is_file() else [folder]:
        pickles = sorted(path for name in PICKLES for path in part.glob(name))
        if pickles and not any(part.glob("*.safetensors")):
            raise ValueError(
                f"{pickles[0]} is a pickle, which may run any code when it is read, so it is not; safetensors are "
                "wanted: load it with from_pretrained, if you trust the file, and save it with save_pretrained"
            )
