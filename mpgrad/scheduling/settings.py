"""What every worker of a pool starts with."""

from __future__ import annotations

from typing import NamedTuple

from mpgrad.environment import Since

__all__ = ["Settings"]


class Settings(NamedTuple):
    """What a scheduler is made with; some of it is told to each worker (`Start`)."""

    workers: int
    initializer: bytes  # pickle of (function or None, arguments)
    threads: int | None  # intra-op; None: nobody has said how many
    calls: int | None  # after which a worker is replaced
    retries: int  # of a call whose worker died; 0: what is lost is lost
    graph_bytes: int | None  # of graphs in each worker; beyond, they are dropped and made again
    spares_memory: bool  # graphs are dropped, too, where memory is about to end
    devices: tuple[int, ...] | None = None  # the code of each worker's device
    in_process: bool = False  # workers are threads of this process: they cannot be killed
    remote: bool = False  # workers may be on other machines
    since: Since | None = None  # the caller's environment when the pool began, where workers follow it
    in_caller: bool = False  # calls run in the thread that waits for them

    @property
    def recoverable(self) -> bool:
        """Whether calls are kept as long as their graphs, to be run again."""
        return self.retries > 0 or self.graph_bytes is not None
