"""The private broadcast group of one membership: learner rank 0 and every engine rank.

Owns sockets, store and process group; imports torch only. Invariant: torch.distributed's default group is never touched,
every listener binds one given interface, and no call waits longer than the spec's timeout_s.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import BroadcastOptions, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.weights.base import WeightsError

BACKLOG = 128
LOCAL_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class GroupSpec:
    """One member's view of a membership. rank 0 is the learner and hosts the store at host:port."""

    backend: Literal["gloo", "nccl"]
    host: str
    port: int
    tag: str  # random, tells this membership's keys from any other's
    rank: int
    world_size: int
    membership: int
    timeout_s: float  # longest formation, and longest single broadcast

    @property
    def device(self) -> torch.device:
        """Where buckets must lie for this backend. Raises WeightsError when it is the GPU and this process sees none."""
        if self.backend == "gloo":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise WeightsError(
                "the learner sends over nccl, which needs a GPU, and this process sees none: set weights.backend=gloo"
            )
        return torch.device("cuda", torch.cuda.current_device())


class Listener:
    """The store of a membership, serving on its port already: who connects before the group forms gets an answer.

    (A bare listening socket would let a member connect and then wait without end for a learner that gave up.)
    """

    def __init__(self, store: TCPStore) -> None:
        self._store: TCPStore | None = store

    def take(self) -> TCPStore:
        """Hand the store over; the port is free once the taker lets go of it."""
        store, self._store = self._store, None
        if store is None:
            raise ValueError("this listener has served its membership: listen anew")
        return store

    def close(self) -> None:
        """Free the port of a listener that nobody took."""
        self._store = None


def listen(host: str) -> tuple[Listener, int]:
    """A listener on a free port of host, and that port: known before anybody must connect, so there is no race for it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        sock.listen(BACKLOG)
        port = sock.getsockname()[1]
        # Given no socket, TCPStore would listen on every interface.
        store = TCPStore(
            host,
            port,
            world_size=None,
            is_master=True,
            wait_for_workers=False,
            timeout=LOCAL_TIMEOUT,
            master_listen_fd=sock.detach(),
        )
    return Listener(store), port


class WeightGroup:
    """A formed group. Construction waits for all members. Usable from any one thread at a time."""

    def __init__(self, spec: GroupSpec, listener: Listener | None = None) -> None:
        """Rank 0 gives the listener that `listen` returned, which this group then owns. Raises WeightsError when not
        every member has come within spec.timeout_s."""
        self.spec = spec
        problem = ""
        try:
            self._store: Any = _store(spec, listener)
            named = PrefixStore(spec.tag, self._store)
            named.set(f"here/{spec.rank}", "1")
            self._group: Any = _process_group(spec, named)
        except (RuntimeError, ValueError, OSError) as e:
            problem = _one_line(e)
        # Raised out here: within the handler the old traceback would keep the store, and so the port, alive.
        if problem:
            absent = self._absent() if spec.rank == 0 else ()
            self.close()
            who = f" (rank {', '.join(map(str, absent))} never came)" if absent else ""
            raise WeightsError(
                f"forming the weight group of membership {spec.membership} (rank {spec.rank} of {spec.world_size}, "
                f"{spec.host}:{spec.port}) failed within {spec.timeout_s:g} s: {problem}{who}",
                absent,
            )

    def broadcast(self, bucket: torch.Tensor) -> None:
        """Fill `bucket` (uint8 [bytes], contiguous, on spec.device) on every rank with rank 0's. Raises WeightsError."""
        spec = self.spec
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=spec.timeout_s)
        try:
            work = self._group.broadcast([bucket], options)
            # An explicit timeout makes NCCL's wait block this thread, and abort, rather than only order the stream.
            work.wait(options.timeout)
        except (RuntimeError, ValueError) as e:
            raise WeightsError(
                f"a broadcast of {bucket.numel()} bytes in membership {spec.membership} (rank {spec.rank} of "
                f"{spec.world_size}) failed within {spec.timeout_s:g} s: {_one_line(e)}"
            ) from None

    def _absent(self) -> tuple[int, ...]:
        """The ranks that have not reached the store."""
        try:
            named = PrefixStore(self.spec.tag, self._store)
            return tuple(rank for rank in range(1, self.spec.world_size) if not named.check([f"here/{rank}"]))
        except (RuntimeError, AttributeError):  # the store itself is what failed
            return ()

    def close(self) -> None:
        """Free the port, the connections and the threads; a second call does nothing."""
        group, self._group = getattr(self, "_group", None), None
        if group is not None and self.spec.backend == "nccl":
            group.abort()
        self._store = None


def _store(spec: GroupSpec, listener: Listener | None) -> TCPStore:
    timeout = timedelta(seconds=spec.timeout_s)
    if (spec.rank == 0) != (listener is not None):
        raise ValueError("rank 0, and only rank 0, brings the listener")
    if listener is None:
        return TCPStore(spec.host, spec.port, world_size=None, is_master=False, timeout=timeout, wait_for_workers=False)
    store = listener.take()
    store.set_timeout(timeout)
    return store


def _process_group(spec: GroupSpec, store: Store) -> Any:
    timeout = timedelta(seconds=spec.timeout_s)
    if spec.backend == "nccl":
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return ProcessGroupNCCL(store, spec.rank, spec.world_size, nccl)
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    gloo._timeout = timeout
    gloo._threads = 1
    host = spec.host if spec.rank == 0 else _own_address(spec.host, spec.port)
    gloo._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    return ProcessGroupGloo(store, spec.rank, spec.world_size, gloo)


def _own_address(host: str, port: int) -> str:
    """The address of this host on the way to the learner; connecting a datagram socket sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
