"""What peft leaves on a model: layers around layers, and a mark."""

BASE = "base_layer"  # what an adapter is put around; its own matrices lie beside it
ADAPTED = "_hf_peft_config_loaded"  # of a model into which transformers has put adapters
