"""The reference: the same model in one process, without pages and without a transfer."""

from __future__ import annotations

from pdxfer.demo.model import load
from pdxfer.demo.options import WorkerOptions
from pdxfer.demo.prompts import ANSWER_TOKENS, CHUNK_TOKENS
from pdxfer.launch.channel import Channel, Event, numbers
from pdxfer.launch.child import child_main


def run(channel: Channel, event: Event) -> None:
    """Answer prompts until the parent closes the channel."""
    options = WorkerOptions.from_event(event["options"])
    model = load(options.model, options.seed, options.dtype, options.folder)
    channel.send(event="ready")
    while True:
        prompt = numbers(channel.receive(None), "tokens")
        cache, first = model.prefill(prompt, CHUNK_TOKENS)
        channel.send(event="answer", tokens=model.decode(cache, first, ANSWER_TOKENS))


if __name__ == "__main__":
    child_main(run)
