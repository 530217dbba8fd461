"""What peft leaves on a model: layers around layers, and a mark."""

BASE = "base_layer"  # what an adapter is put around; its own matrices lie beside it


def holds_adapters(model: object) -> bool:
    """Whether transformers has put adapters into the model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))
