"""Late news: numbers that the device has and the host learns later, without waiting for them now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.one_sided.transport import Transport


@dataclass(frozen=True, eq=False)
class Message:
    """Numbers on their way to the host, behind the transport's faults in memory, with the function that takes them.

    Attributes:
        there: an event after the copy, or None where it has come.
    """

    copy: Tensor
    shape: torch.Size
    there: Any
    tell: Callable[[Tensor], None]


@dataclass(eq=False)
class LateNews:
    """Messages to the host, in the order in which they were sent."""

    transport: Transport
    messages: list[Message] = field(default_factory=list, repr=False)

    def send(self, numbers: Tensor, tell: Callable[[Tensor], None]) -> None:
        """Copy int64 ``numbers`` to the host, which does not wait, and call ``tell`` with them when it reads."""
        message = torch.cat([self.transport.faults.flatten(), numbers.flatten()])
        there: Any = None
        copy = collectives.on_host(message)
        if message.is_cuda:
            there = torch.cuda.Event()
            there.record(torch.cuda.current_stream(message.device))
        self.messages.append(Message(copy, numbers.shape, there, tell))

    def take(self) -> list[Message]:
        """Return the messages so far, and forget them.

        Each replay of a recorded forward sends its messages anew, see :meth:`send_again`.
        """
        messages, self.messages = self.messages, []
        return messages

    def send_again(self, messages: list[Message], there: Any) -> None:
        """Send messages again, which have come at the event ``there``, or have come already if it is None."""
        self.messages = [replace(one, there=there) for one in messages]

    def read(self) -> None:
        """Wait for all messages, and pass them on.

        Raises:
            ExchangeFailed: rows did not come, or had no room. Later messages are forgotten: they were computed from
                NaN.
        """
        faults = self.transport.faults
        for one in self.take():
            if one.there is not None:
                one.there.synchronize()
            self.transport.check(one.copy[: faults.numel()].view(faults.shape))
            one.tell(one.copy[faults.numel() :].view(one.shape))
