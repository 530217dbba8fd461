"""How long `accel.quantize` takes with calibration, layer by layer, and the GPU memory it needs at most.

    python benchmarks/calibrating.py OUT.json [--model llama-8b] [--layers 4] [--ways int4:gptq int4:awq]
    python benchmarks/calibrating.py OUT.json --folder FOLDER [--ways int8:rtn int4:gptq]

Random weights at the real sizes and random tokens: neither changes what is computed. With fewer layers than the model
has, whole_s is what all would take by the mean of those measured. With a folder the model is saved there first; each
way then is what `accel quantize FOLDER` does, the model on the CPU and a layer at a time on the GPU, and `accel.load`
of what it saved. All is written as soon as it is known.
"""

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import accel
from accel.bench.llm.configs import CONFIGS
from accel.bench.llm.models import config_of
from accel.bench.machine import commit, machine, now
from accel.bench.memory import release
from accel.llm.ptq.run import quantize
from accel.llm.recording.recorder import decoder_layers

STOCK = "stock"  # the model's own folder in the one that is given


def built(name: str, layers: int | None, device: torch.device, dtype: torch.dtype) -> tuple[torch.nn.Module, int]:
    """A model of so many layers, and how many it has at its real size."""
    config = config_of(name)
    whole = config.num_hidden_layers
    config.num_hidden_layers = min(whole, layers or whole)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), whole


def peak(device: torch.device) -> float:
    return round(torch.cuda.max_memory_allocated(device) / 2**20, 1) if device.type == "cuda" else 0.0


def measured(given: argparse.Namespace, scheme: str, method: str, device: torch.device, dtype: torch.dtype) -> dict:
    model, whole = built(given.model, given.layers, device, dtype)
    ids = torch.randint(0, model.config.vocab_size, (given.windows, given.tokens), device=device)
    forget(device)
    before = round(sum(p.nbytes for p in model.parameters()) / 2**20, 1)
    start = time.perf_counter()
    done = quantize(model, scheme, list(ids[:, None]), None, method, None, lambda count, of: None)
    taken, each = time.perf_counter() - start, list(done.seconds.values())
    return {
        "scheme": scheme,
        "method": method,
        "layers": len(each),
        "took_s": round(taken, 2),
        "layer_s": [round(seconds, 3) for seconds in each],
        "whole_s": round(taken + (whole - len(each)) * statistics.mean(each), 1),
        "model_mb": before,
        "peak_mb": peak(device),
        "notes": sorted({note for notes in done.notes.values() for note in notes})[:3],
    }


def from_folder(given: argparse.Namespace, scheme: str, method: str, device: torch.device) -> dict:
    start, out = time.perf_counter(), given.folder / f"{scheme}-{method}"
    model = AutoModelForCausalLM.from_pretrained(given.folder / STOCK, dtype="auto")
    read = time.perf_counter() - start
    _, layers = decoder_layers(model)
    layer = sum(p.nbytes for p in layers[0].parameters()) / 2**20
    ids = torch.randint(0, model.config.vocab_size, (given.windows, given.tokens))
    data = None if method == "rtn" else list(ids[:, None])
    forget(device)
    start = time.perf_counter()
    done = quantize(model, scheme, data, None, method, out, lambda count, of: None, device=device)
    row = {"scheme": scheme, "method": method, "layers": len(done.seconds), "read_s": round(read, 2)}
    row |= {"layers_s": round(sum(done.seconds.values()), 2), "quantize_s": round(time.perf_counter() - start, 2)}
    row["quantize_peak_mb"] = peak(device)
    del model, layers
    release(device)
    forget(device)
    start = time.perf_counter()
    loaded = accel.load(out, device=device)
    row |= {"load_s": round(time.perf_counter() - start, 2), "load_peak_mb": peak(device)}
    final = sum(tensor.nbytes for tensor in (*loaded.parameters(), *loaded.buffers())) / 2**20
    row |= {"final_mb": round(final, 3), "final_and_two_layers_mb": round(final + 2 * layer, 3)}
    if not bool(loaded(ids[:1].to(device)).logits.isfinite().all()):
        raise AssertionError("what was loaded gives NaN or Inf")
    shutil.rmtree(out)
    return row


def forget(device: torch.device) -> None:
    """The most memory so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@torch.no_grad()
def main(given: argparse.Namespace) -> dict:
    started, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    result = {
        "case": f"calibrating-{given.model}",
        "about": f"accel.quantize of {given.model} on {given.windows} windows of {given.tokens} tokens, random weights",
        "date": now(),
        "commit": commit(),
        "machine": machine(device),
        "dtype": str(dtype).removeprefix("torch."),
        "rows": [],
        "failed": [],
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    if given.folder is not None:
        model, _ = built(given.model, given.layers, device, dtype)
        model.save_pretrained(given.folder / STOCK)
        del model
        release(device)
        print("saved", round(time.monotonic() - started, 1), flush=True)
    for scheme, method in given.ways:
        try:
            if time.monotonic() - started > given.seconds:
                raise TimeoutError(f"{given.seconds:g} seconds were over")
            whole = given.folder is not None
            row = (
                from_folder(given, scheme, method, device) if whole else measured(given, scheme, method, device, dtype)
            )
            result["rows"].append(row)
            print(result["rows"][-1], flush=True)
        except Exception as error:  # one way that fails must not cost the others
            result["failed"].append({"way": f"{scheme}:{method}", "reason": f"{type(error).__name__}: {error}"[:300]})
            print(result["failed"][-1], flush=True)
        release(device)
        result["took_s"] = round(time.monotonic() - started, 1)
        given.out.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _way(text: str) -> tuple[str, str]:
    scheme, _, method = text.partition(":")
    return scheme, method or "rtn"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="llama-8b", choices=list(CONFIGS))
    parser.add_argument("--layers", type=int, help="as many as the model has by default")
    ways = [("int4", "gptq"), ("int4", "awq"), ("int8", "smoothquant")]
    parser.add_argument("--ways", type=_way, nargs="+", default=ways, help="SCHEME:METHOD")
    parser.add_argument("--windows", type=int, default=128, help="of calibration, 128 at most")
    parser.add_argument("--tokens", type=int, default=512, help="of each window, as of `accel quantize`")
    parser.add_argument("--folder", type=Path, help="where to save the model, and what comes of it")
    parser.add_argument("--seconds", type=float, default=300.0, help="after so many nothing new is begun")
    return parser.parse_args(given)


if __name__ == "__main__":
    main(arguments())
