"""How long `accel.quantize` takes with calibration, layer by layer, and the GPU memory it needs at most.

Random weights at the real sizes and random tokens: neither changes what is computed. The model is saved in a folder;
each way then is what `accel quantize FOLDER` does, the model on the CPU and a layer at a time on the GPU, and
`accel.load` of what it saved.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import accel
from accel.bench.llm.models import config_of, from_config
from accel.bench.memory import release
from accel.bench.timing import Clock
from accel.llm.ptq.run import quantize
from accel.llm.recording.recorder import decoder_layers
from benchmarks.study import DEVICE, HALF, Study, words

STOCK = "stock"  # the model's own folder in the one that is given


def save(name: str, layers: int | None, folder: Path) -> int:
    """Saves a model of so many layers; the size of its vocabulary."""
    config = config_of(name)
    config.num_hidden_layers = min(config.num_hidden_layers, layers or config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    from_config(config, DEVICE, HALF).save_pretrained(folder / STOCK)
    return config.vocab_size


def peak() -> float:
    return round(torch.cuda.max_memory_allocated(DEVICE) / 2**20, 1) if DEVICE.type == "cuda" else 0.0


def forget() -> None:
    """The most memory so far."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats(DEVICE)


def from_folder(folder: Path, ids: torch.Tensor, scheme: str, method: str) -> dict:
    """Raises AssertionError where what was loaded gives NaN or Inf."""
    clock, out = Clock(), folder / f"{scheme}-{method}"
    model = AutoModelForCausalLM.from_pretrained(folder / STOCK, dtype="auto")
    read_s = round(clock.taken(), 2)
    _, layers = decoder_layers(model)
    layer = sum(p.nbytes for p in layers[0].parameters()) / 2**20
    data = None if method == "rtn" else list(ids[:, None])
    forget()
    clock = Clock()
    done = quantize(model, scheme, data, None, method, out, lambda count, of: None, device=DEVICE)
    row = {"layers": len(done.seconds), "read_s": read_s, "layers_s": round(sum(done.seconds.values()), 2)}
    row |= {"quantize_s": round(clock.taken(), 2), "quantize_peak_mb": peak()}
    del model, layers
    release(DEVICE)
    forget()
    clock = Clock()
    loaded = accel.load(out, device=DEVICE)
    row |= {"load_s": round(clock.taken(), 2), "load_peak_mb": peak()}
    final = sum(tensor.nbytes for tensor in (*loaded.parameters(), *loaded.buffers())) / 2**20
    row |= {"final_mb": round(final, 3), "final_and_two_layers_mb": round(final + 2 * layer, 3)}
    assert bool(loaded(ids[:1].to(DEVICE)).logits.isfinite().all()), "what was loaded gives NaN or Inf"
    shutil.rmtree(out)
    return row


def main(
    out: Path, model: str = "llama-8b", layers: int | None = None, ways: str = "int8:rtn,int4:gptq",
    windows: int = 128, tokens: int = 512, folder: Path | None = None, seconds: float = 900.0,
) -> dict:  # fmt: skip
    """layers: as many as the model has by default. ways: SCHEME:METHOD. windows, tokens: of calibration. folder: where
    the model is saved, and for a while what comes of it. seconds: after so many nothing new is begun.
    """
    about = f"accel.quantize of {model} on {windows} windows of {tokens} tokens, random weights"
    record = Study(f"calibrating-{model}", out, about, seconds, rows=[])
    with tempfile.TemporaryDirectory(dir=folder) as own:
        vocabulary = save(model, layers, Path(own))
        release(DEVICE)
        ids = torch.randint(0, vocabulary, (windows, tokens), generator=torch.Generator().manual_seed(0))
        for scheme, _, method in (way.partition(":") for way in words(ways)):
            about = {"scheme": scheme, "method": method or "rtn"}
            if record.in_time(**about):
                with record.attempt(**about):  # one way that fails must not cost the others
                    record.add("rows", about | from_folder(Path(own), ids, **about))
                release(DEVICE)
    return record.result
