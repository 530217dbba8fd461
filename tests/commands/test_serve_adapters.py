"""`accel serve`: requests that name an adapter."""

import pytest
import torch

from support.llm.batching.serving import FOLDER, complete, post, settled, streamed

peft = pytest.importorskip("peft")
for package in ("openai", "fastapi", "uvicorn"):
    pytest.importorskip(package)


def test_a_request_names_its_adapter(server, stock):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_alpha=64)
    complete(server, "The", 1)
    (timed,) = server._model_manager.loaded_models.values()
    plain = stock.answer("The", 8)
    for model in (timed.model, stock.model):
        peft.inject_adapter_in_model(config, model, adapter_name="loud")
        with torch.no_grad():
            for number, part in enumerate(one for name, one in model.named_parameters() if "lora_" in name):
                part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(number)) / 4)
    wanted, seen = stock.answer("The", 8), {}
    for name in ("loud", "__base__"):
        seen[name] = {call(server, "The", extra_body={"adapter": name}) for call in (complete, streamed)}
    assert seen == {"loud": {wanted}, "__base__": {plain}} and wanted != plain
    for wrong, shown in (("quiet", "'loud'"), (5, "a string")):
        status, detail = post(server, "completions", {"model": FOLDER, "prompt": "The", "adapter": wrong})
        assert status == 400 and repr(wrong) in detail and shown in detail
    settled(server)
