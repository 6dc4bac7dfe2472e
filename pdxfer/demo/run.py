"""The demo: two daemons, a prefill, a decode and a reference process, and a verdict.

This process only starts the others, asks and compares; it loads neither torch nor the client.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pdxfer import limits
from pdxfer.demo.options import Side, WorkerOptions
from pdxfer.demo.prompts import PROMPT_TOKENS, Prompt, seeded
from pdxfer.demo.show import Progress, Row, table
from pdxfer.launch.channel import number, numbers, text, texts
from pdxfer.launch.child import Child
from pdxfer.launch.daemons import DaemonPair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VOCABULARY = 4096
_SEED = 0
_OTHER_SEED = 1


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line chose."""

    lane: str = "tcp"
    embedded: bool = False
    negative: bool = False
    model: str = "llama"
    dtype: str = "float32"
    prefill: Side = field(default_factory=Side)
    decode: Side = field(default_factory=Side)
    prompt_tokens: tuple[int, ...] = PROMPT_TOKENS
    """Tokens of each prompt, where prompts are made from a seed."""


def run(options: DemoOptions) -> int:
    """Run the demo; 0 when every prompt's tokens and cache are equal, else 1."""
    start = time.monotonic()
    with ExitStack() as stack:
        model, prompts, read = _choose_model(options, stack)
        rows = _transfer(options, model, prompts, read, stack)
    sides = (options.prefill, options.decode)
    print(table(rows, sides if sides != (Side(), Side()) else ()))
    for row in rows:
        if row.answer:
            print(f"\n[{row.prompt_tokens} tokens] {row.answer}")
    equal = all(row.tokens_equal and row.cache_equal for row in rows)
    verdict = "EQUAL" if equal else "DIFFERENT"
    print(f"\n{verdict} in {time.monotonic() - start:.1f} s: {_story(options)}")
    return 0 if equal else 1


def _story(options: DemoOptions) -> str:
    agents = "embedded agents" if options.embedded else "two daemons"
    weights = ", and the decode side has OTHER weights on purpose" if options.negative else ""
    return f"a {options.model} cache crossed between two processes over {agents}{weights}"


def _choose_model(
    options: DemoOptions, stack: ExitStack
) -> tuple[WorkerOptions, list[Prompt], Callable[[Sequence[int]], str]]:
    """What the workers run, what they are asked, and how an answer reads."""
    blank = WorkerOptions(
        model=options.model,
        folder="",
        seed=_SEED,
        dtype=options.dtype,
        model_name=f"pdxfer-demo-{options.model}@{_SEED}",
        socket_path="",
        lane=options.lane,
        tokens_max=0,
        relayout=options.prefill != options.decode,
    )
    if options.model != "smollm2":
        prompts = seeded(VOCABULARY, counts=options.prompt_tokens)
        read: Callable[[Sequence[int]], str] = _no_text
    else:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdxfer-"))
        print("loading SmolLM2-135M (about a minute)", file=sys.stderr)
        child = stack.enter_context(Child("preparing", "pdxfer.demo.smollm2", folder=folder))
        prepared = child.receive("prepared", limits.CHILD_START_TIMEOUT_S)
        questions = texts(prepared, "texts")
        prompts = []
        for index, question in enumerate(questions):
            prompts.append(Prompt(tuple(numbers(prepared, f"tokens.{index}")), question))
        blank = replace(blank, folder=folder, model_name="SmolLM2-135M-Instruct")

        def read(tokens: Sequence[int]) -> str:
            child.send(tokens=list(tokens))
            return text(child.receive("text"), "text")

    if options.negative:
        blank = replace(blank, model_name="")
    longest = max(len(prompt.tokens) for prompt in prompts)
    return replace(blank, tokens_max=longest), prompts, read


def _no_text(tokens: Sequence[int]) -> str:
    return ""


def _transfer(
    options: DemoOptions,
    model: WorkerOptions,
    prompts: list[Prompt],
    read: Callable[[Sequence[int]], str],
    stack: ExitStack,
) -> list[Row]:
    sockets = {"prefill": "", "decode": ""}
    if not options.embedded:
        pair = stack.enter_context(DaemonPair(options.lane))
        sockets = {"prefill": pair.prefill.socket, "decode": pair.decode.socket}
    other = replace(model, seed=_OTHER_SEED) if options.negative else model
    workers = {
        "prefill": replace(model, socket_path=sockets["prefill"], side=options.prefill),
        "decode": replace(other, socket_path=sockets["decode"], side=options.decode),
        "reference": other,
    }
    modules = {"prefill": "prefill_worker", "decode": "decode_worker", "reference": "reference"}
    children = {
        name: stack.enter_context(
            Child(name, f"pdxfer.demo.{modules[name]}", options=worker.to_event())
        )
        for name, worker in workers.items()
    }
    progress = Progress(2 + 4 * len(prompts))
    progress.step("three processes load the model")
    ready = {
        name: child.receive("ready", limits.CHILD_START_TIMEOUT_S)
        for name, child in children.items()
    }
    children["decode"].send(prefill=ready["prefill"]["addresses"])
    children["decode"].receive("connected")
    progress.step("connected")
    rows = [
        _one_prompt(room, prompt, children, read, progress)
        for room, prompt in enumerate(prompts, start=1)
    ]
    progress.close()
    return rows


def _one_prompt(
    room: int,
    prompt: Prompt,
    children: dict[str, Child],
    read: Callable[[Sequence[int]], str],
    progress: Progress,
) -> Row:
    prefill, decode, reference = (children[name] for name in ("prefill", "decode", "reference"))
    count = len(prompt.tokens)
    # Receive first, then send, and the other way round: either order has to work.
    if room % 2:
        decode.send(room=room, token_count=count)
        decode.receive("receiving")
    prefill.send(room=room, tokens=prompt.tokens)
    prefill.receive("computed")
    progress.step(f"{count} tokens: prefill is done")
    if not room % 2:
        decode.send(room=room, token_count=count)
        decode.receive("receiving")
    committed = decode.receive("committed")
    sent = prefill.receive("sent")
    progress.step(f"{count} tokens: {number(committed, 'length_bytes'):,} bytes are across")
    answer = numbers(decode.receive("answer"), "tokens")
    progress.step(f"{count} tokens: decode has answered")
    reference.send(tokens=prompt.tokens)
    expected = numbers(reference.receive("answer"), "tokens")
    progress.step(f"{count} tokens: reference has answered")
    commit_ns = number(committed, "commit_ns")
    return Row(
        prompt_tokens=count,
        tokens_equal=answer == expected,
        cache_equal=set(texts(committed, "digests")) == {text(sent, "digest")},
        length_bytes=number(committed, "length_bytes"),
        pages=number(sent, "pages"),
        sends=number(sent, "sends"),
        runs=number(committed, "runs"),
        lane=text(committed, "lane"),
        seconds=(commit_ns - number(sent, "first_send_ns")) / 1e9,
        commit_s=(commit_ns - number(sent, "last_send_ns")) / 1e9,
        answer=read(answer),
    )
