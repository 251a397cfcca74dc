"""Two numbers that say whether bytes arrived and whether weights are in place.

Imports torch only. Invariant: the checksum depends on the names, the places and the bits of the tensors, never on the
order in which they are visited nor on how an engine fuses or pads them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MODULUS = 1 << 64


def digest(bucket: torch.Tensor) -> str:
    """sha256 of a bucket (uint8 [bytes]), in hex; lets other threads run meanwhile."""
    return hashlib.sha256(bucket.cpu().numpy().data).hexdigest()


def checksum(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """16 hex digits over (Hugging Face name, full tensor) pairs: the sum of `tensor_sum` over all of them."""
    return finish(sum(tensor_sum(name, tensor) for name, tensor in named))


def finish(total: int) -> str:
    """The printed form of summed `tensor_sum`s."""
    return f"{total % MODULUS:016x}"


def tensor_sum(name: str, tensor: torch.Tensor) -> int:
    """crc32(name) * sum over rows r of (r + 1) * sum of the row's bits, read as integers, mod 2**64.

    The weights by name and row make a tensor that landed under another name, or with its rows moved, show. Rows are what
    fusing leaves whole. A row is read as int64 where its length allows, which is an order of magnitude faster.
    """
    if tensor.numel() == 0:
        return 0
    rows = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1).contiguous()
    row_bytes = rows.shape[1] * rows.element_size()
    if rows.storage_offset() * rows.element_size() % 8:
        rows = rows.clone()
    raw = rows.view(torch.int64 if row_bytes % 8 == 0 else INTEGERS[rows.element_size()])
    sums = raw.sum(dim=1, dtype=torch.int64)  # int64 wraps, which is arithmetic mod 2**64
    weights = torch.arange(1, len(sums) + 1, dtype=torch.int64, device=sums.device)
    return int((sums * weights).sum()) * (zlib.crc32(name.encode()) | 1) % MODULUS
