"""The control links of a decode agent: one to each prefill address that workers name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol

from pdxfer import limits
from pdxfer.control.link import ControlLink
from pdxfer.errors import ConfigError, PdxferError, ResourceError
from pdxfer.wire.address import canonical_address, split_instance


class LinkOwner(Protocol):
    """What `Links` asks of the decode machine, and tells it. Control addresses name links."""

    @property
    def named_links(self) -> set[str]:
        """Control addresses that live receives name."""
        ...

    def link_named(self, control: str, now: float) -> None:
        """A link to this address is being made: from now on it is waited for."""
        ...

    def link_forgotten(self, control: str) -> None:
        """The link was dropped: nobody answered there, and no receive names it."""
        ...

    def link_troubled(self, control: str, problem: str) -> None:
        """The link has no session now, and goes on trying; `problem` says why, in words."""
        ...


class Links:
    """Makes links when an address is first named, drops those that nobody needs. Loop thread only.

    Args:  owner: the decode machine. make: makes a link to a control address, not started.
           refused: called when a link cannot come up, with the reason.
    """

    def __init__(
        self,
        owner: LinkOwner,
        make: Callable[[str], ControlLink],
        refused: Callable[[str, PdxferError], None],
    ) -> None:
        self._owner = owner
        self._make = make
        self._refused = refused
        self._links: dict[str, ControlLink] = {}
        """The links by control address."""
        self._needed_at: dict[str, float] = {}
        """Control address to when its link last had a session or was named by a room."""
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._links)

    def get(self, control: str) -> ControlLink | None:
        """The link of a control address."""
        return self._links.get(control)

    async def close(self, reason: str) -> None:
        """Say goodbye to every peer."""
        for task in list(self._tasks):
            task.cancel()
        links, self._links = dict(self._links), {}
        for link in links.values():
            await link.close(reason)

    def ensure(self, addresses: list[str], now: float) -> tuple[str, ...]:
        """Start a link for each new control address; the addresses in their one form.

        Raises:
            ConfigError: no address, or one that is none.
            ResourceError: too many addresses are in use.
        """
        if not addresses:
            raise ConfigError("prefill= names no address; pass the `addresses` of a PrefillClient")
        canonical = tuple(canonical_address(address) for address in addresses)
        for address in canonical:
            control, _ = split_instance(address)
            if control not in self._links:
                self._make_room()
                self._start(control, now)
            self._needed_at[control] = now
        return canonical

    def drop_idle(self, now: float) -> None:
        """Drop links that nobody answers and no room names, since prefill agents come and go."""
        named = self._owner.named_links
        for control, link in list(self._links.items()):
            if link.remote is not None or control in named:
                self._needed_at[control] = now
            elif now - self._needed_at[control] > limits.LINK_IDLE_S:
                self._drop(control)

    def watch(self, control: str) -> None:
        """A session was lost: tell those who wait for the next one why it does not come."""
        link = self._links.get(control)
        if link is not None:
            self._spawn(self._watch(control, link))

    def _make_room(self) -> None:
        """Before another link: drop the one that is idle for longest."""
        if len(self._links) < limits.LINKS_PER_AGENT_MAX:
            return
        named = self._owner.named_links
        idle = [c for c, link in self._links.items() if link.remote is None and c not in named]
        if not idle:
            raise ResourceError(
                f"{len(self._links)} prefill addresses are in use, at most "
                f"{limits.LINKS_PER_AGENT_MAX} may be",
                retryable=True,
            )
        self._drop(min(idle, key=lambda control: self._needed_at[control]))

    def _start(self, control: str, now: float) -> None:
        link = self._links[control] = self._make(control)
        self._owner.link_named(control, now)
        self._spawn(self._start_and_watch(control, link))

    def _drop(self, control: str) -> None:
        link = self._links.pop(control)
        self._needed_at.pop(control, None)
        self._owner.link_forgotten(control)
        self._spawn(link.close("no room needs it"))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_and_watch(self, control: str, link: ControlLink) -> None:
        try:
            await link.start()
        except PdxferError as error:
            self._refused(control, error)
            if self._links.get(control) is link:
                self._drop(control)  # the next room that names it tries again
            return
        if self._links.get(control) is not link:
            await link.close()  # dropped while it began
            return
        await self._watch(control, link)

    async def _watch(self, control: str, link: ControlLink) -> None:
        """Report why the link has no session, until it has one."""
        if link.is_refused:  # the next session may well end the same way: not in a tight loop
            await asyncio.sleep(limits.LINK_RETRY_S)
        while True:
            try:
                await link.ready(limits.LINK_PROBLEM_INTERVAL_S)
            except PdxferError as error:
                if self._links.get(control) is not link:
                    return  # dropped meanwhile
                if error.retryable:
                    text = f"the prefill agent at {control} does not answer: {link.problem}"
                    self._owner.link_troubled(control, text)
                    if link.is_refused:
                        await asyncio.sleep(limits.LINK_RETRY_S)
                else:
                    self._refused(control, error)
                    await asyncio.sleep(limits.LINK_RETRY_S)
            else:
                return
