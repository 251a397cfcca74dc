"""A rollout's end: joins the group and fills staging buffers in a thread, while its owner goes on generating.

Imports torch only. Invariant: nothing here waits for the network but the receiver's own thread; `tensors` exists only
when every bucket of the posted version has arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from async_rl.observability.waiting import waiting
from async_rl.weights.base import WeightsError
from async_rl.weights.checksum import digest, finish, tensor_sum
from async_rl.weights.group import GroupSpec, WeightGroup
from async_rl.weights.manifest import Bucket, Manifest


class Receiver:
    """One member of one membership. `post` for each version, then `wait` (or `arrived`), then `tensors`."""

    def __init__(self, spec: GroupSpec, manifest: Manifest, pinned: bool = False) -> None:
        """Starts nothing; the first `post` joins the group. `pinned`: staging on the host is read by a GPU."""
        self.spec = spec
        self.manifest = manifest
        self._pinned = pinned and spec.device.type == "cpu"
        self._staging: torch.Tensor | None = None
        self._group: WeightGroup | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # over the three flags below: who of owner and thread frees what
        self._running = False
        self._closed = False
        self._digests: list[str] | None = None
        self._error = ""
        self.checksum = ""  # of what was received; known when `arrived`

    def post(self) -> None:
        """Start receiving one version; raises WeightsError while an earlier one is still on its way."""
        with self._lock:
            if self._closed or self._running:
                raise WeightsError(f"membership {self.spec.membership} cannot receive now: use a new membership")
            self._running = True
            self._digests, self._error, self.checksum = None, "", ""
        self._thread = threading.Thread(target=self._run, name=f"weights-{self.spec.membership}", daemon=True)
        self._thread.start()

    def arrived(self) -> list[str] | None:
        """The digest of each bucket, or None while some are missing. Raises WeightsError when they will not come."""
        if self._error:
            raise WeightsError(self._error)
        return self._digests

    def wait(self, timeout_s: float) -> list[str]:
        """Block until everything has arrived; raises WeightsError."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        digests = self.arrived()
        if digests is None:
            raise WeightsError(
                f"weights of membership {self.spec.membership} have not arrived within {timeout_s:g} s: is the learner sending?"
            )
        return digests

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view into staging) of what arrived, valid until the next `post` or `close`."""
        if self.arrived() is None or self._staging is None:
            raise WeightsError(f"no complete weights are staged in membership {self.spec.membership}")
        return self._views(self._staging)

    def close(self) -> None:
        """Leave the group and free the staging memory; a thread still waiting does both when its deadline ends."""
        with self._lock:
            self._closed = True
            if not self._running:
                self._release()

    def _views(self, staging: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for offset, spec in zip(self.manifest.offsets, self.manifest.tensors, strict=True):
            piece = staging[offset : offset + spec.num_bytes]
            yield spec.name, piece.view(getattr(torch, spec.dtype)).view(spec.shape)

    def _run(self) -> None:
        digests, error = None, ""
        try:
            digests = self._receive()
        except Exception as e:  # whatever it is, the owner learns of it from `arrived`
            error = str(e) or repr(e)
        with self._lock:
            self._running = False
            self._digests, self._error = digests, error
            if error:
                self._leave()
            if self._closed:
                self._release()

    def _receive(self) -> list[str]:
        if self._staging is None:
            self._staging = torch.empty(
                self.manifest.num_bytes, dtype=torch.uint8, device=self.spec.device, pin_memory=self._pinned
            )
        staging = self._staging
        who = f"membership {self.spec.membership}, as rank {self.spec.rank} of {self.spec.world_size}"
        if self._group is None:
            with waiting(f"the weight group of {who}, to form"):
                self._group = WeightGroup(self.spec)
        views, num_buckets = list(self._views(staging)), len(self.manifest.buckets)
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:  # checking overlaps the next broadcast
            checks = []
            for bucket_number, bucket in enumerate(self.manifest.buckets):
                if self._closed:
                    raise WeightsError(f"membership {self.spec.membership} was left while weights were arriving")
                with waiting(f"the learner to send bucket {bucket_number} of {num_buckets} to {who}"):
                    self._group.broadcast(staging[bucket.start : bucket.end])
                checks.append(pool.submit(_check, bucket, staging[bucket.start : bucket.end], self.manifest, views))
            found = [check.result() for check in checks]
        self.checksum = finish(sum(total for _, total in found))
        return [hashed for hashed, _ in found]

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _release(self) -> None:
        self._leave()
        self._staging = None


def _check(bucket: Bucket, piece: torch.Tensor, manifest: Manifest, views: list[tuple[str, torch.Tensor]]) -> tuple[str, int]:
    """Digest of a bucket, and the checksum's sum over the tensors that it completes."""
    whole = [p.tensor for p in bucket.parts if p.tensor_offset + p.num_bytes == manifest.tensors[p.tensor].num_bytes]
    return digest(piece), sum(tensor_sum(*views[i]) for i in whole)
