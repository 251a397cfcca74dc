"""The learner's end: its parameters as a stream of buckets, under Hugging Face names.

Imports torch only. Invariant: after a pass over all buckets every tensor has been gathered once, and the memory taken
beside the parameters is at most two buckets and the largest tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from async_rl.weights.checksum import finish, tensor_sum
from async_rl.weights.manifest import ALIGN_BYTES, Manifest, TensorSpec

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
WRAPPER_PREFIXES = ("module.", "base_model.model.")


class WeightSource:
    """Reads the parameters anew at each pass. Every rank of the learner builds one and calls `gather` in the same order."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
        bucket_bytes: int,
        *,
        root: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """`named`: (name, Tensor or DTensor); the same tensor under a second name is a tie and is not sent again.
        Floating tensors travel as `dtype`, others as they are. `root`: whether this rank keeps the bytes.
        `device`: where buckets lie, the GroupSpec's device (default CPU); pinned there when the tensors are on a GPU."""
        self._tensors: list[torch.Tensor] = []
        specs: list[TensorSpec] = []
        ties: dict[str, str] = {}
        seen: dict[tuple, str] = {}
        for wrapped_name, tensor in named:
            name = plain_name(wrapped_name)
            first = seen.setdefault(_identity(tensor), name)
            if first != name:
                ties[name] = first
                continue
            wire = dtype if tensor.is_floating_point() else tensor.dtype
            specs.append(TensorSpec(name, str(wire).removeprefix("torch."), tuple(tensor.shape)))
            self._tensors.append(tensor)
        self._wire = [getattr(torch, spec.dtype) for spec in specs]
        bucket_bytes -= bucket_bytes % ALIGN_BYTES
        self.manifest = Manifest.from_dict(Manifest(tuple(specs), bucket_bytes, ties).to_dict())
        self._root = root
        self._device = device or torch.device("cpu")
        self._pinned = self._device.type == "cpu" and any(tensor.is_cuda for tensor in self._tensors)
        self._buffers: list[torch.Tensor] = []
        self._current: tuple[int, torch.Tensor] | None = None  # the tensor last gathered: the next bucket may go on with it
        self._sums: dict[int, int] = {}

    @torch.no_grad()
    def gather(self, k: int) -> torch.Tensor | None:
        """Bucket k (uint8 [bytes]) on the root, None elsewhere. A collective over the learner's ranks for DTensors.

        The two buffers alternate: what gather(k) returned must have been sent before gather(k + 2).
        """
        bucket = self.manifest.buckets[k]
        if k == 0:
            self._current, self._sums = None, {}
        out = self._buffer(k)[: bucket.num_bytes] if self._root else None
        filled = 0
        for part in bucket.parts:
            whole = self._full(part.tensor)
            if out is not None:
                out[filled : part.bucket_offset].zero_()  # the alignment gap: both sides hash it
                filled = part.bucket_offset + part.num_bytes
                out[part.bucket_offset : filled].copy_(whole[part.tensor_offset : part.tensor_offset + part.num_bytes])
        if out is not None:
            out[filled:].zero_()
        if k == len(self.manifest.buckets) - 1:
            self._current = None
        return out

    def checksum(self) -> str:
        """What a receiver that holds these weights must report; valid on the root after a pass over all buckets."""
        if len(self._sums) != len(self._tensors):
            raise ValueError(f"checksum after {len(self._sums)} of {len(self._tensors)} tensors: gather every bucket first")
        return finish(sum(self._sums.values()))

    def _buffer(self, k: int) -> torch.Tensor:
        if not self._buffers:
            size = min(self.manifest.bucket_bytes, self.manifest.num_bytes)
            count = min(2, len(self.manifest.buckets))
            self._buffers = [
                torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned) for _ in range(count)
            ]
        return self._buffers[k % 2]

    def _full(self, i: int) -> torch.Tensor:
        """The bytes of tensor i, whole and in wire dtype; empty on ranks that only help gathering."""
        if self._current is None or self._current[0] != i:
            self._current = None
            tensor = self._tensors[i]
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            if not self._root:
                self._current = (i, torch.empty(0, dtype=torch.uint8))
            else:
                wire = full.to(self._wire[i]).contiguous()
                self._sums[i] = tensor_sum(self.manifest.tensors[i].name, wire)
                self._current = (i, wire.reshape(-1).view(torch.uint8))
        return self._current[1]


def plain_name(name: str) -> str:
    """The Hugging Face name under what torch.compile, FSDP, DDP or PEFT wrapped around it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    plain = ".".join(parts)
    for prefix in WRAPPER_PREFIXES:
        plain = plain.removeprefix(prefix)
    return plain


def _identity(tensor: torch.Tensor) -> tuple:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # An empty shard has no storage to tell it by.
    place = local.data_ptr() if local.numel() else id(tensor)
    return place, tuple(tensor.shape), tensor.dtype
