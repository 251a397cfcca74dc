"""One batch from rank 0 to every rank, as raw bytes over a gloo group.

Imports torch, numpy and types. Invariant: no pickle, and no dtype but those of Batch; every rank ends with equal arrays,
so whatever is computed from the batch alone (the packing plan, the loss denominator) needs no further word.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from async_rl.types import Batch

_DTYPES: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "prompt_lengths": np.int32,
    "response_lengths": np.int32,
    "logp_behav": np.float32,
    "rewards": np.float64,
    "advantages": np.float64,
    "truncated": np.bool_,
    "mask": np.bool_,
    "lags": np.int32,
    "group_ids": np.int64,
}


def scatter_batch(batch: Batch | None, group: dist.ProcessGroup | None) -> Batch:
    """The batch of rank 0, on every rank. `group` None means a single process.

    Collective over `group` (gloo): a header of lengths, then the bytes. Raises ValueError when rank 0 has no batch.
    """
    root = group is None or dist.get_rank(group) == 0
    if root and batch is None:
        raise ValueError("rank 0 scatters a batch that it does not have")
    if group is None or dist.get_world_size(group) == 1:
        assert batch is not None
        return batch
    arrays = {name: np.ascontiguousarray(getattr(batch, name), dtype) for name, dtype in _DTYPES.items()} if root else {}
    lengths = torch.tensor([len(arrays[name]) if root else 0 for name in _DTYPES], dtype=torch.int64)
    dist.broadcast(lengths, group=group, group_src=0)
    num_bytes = [n * np.dtype(dtype).itemsize for n, dtype in zip(lengths.tolist(), _DTYPES.values(), strict=True)]
    payload = np.empty(sum(num_bytes), np.uint8)
    parts = np.split(payload, np.cumsum(num_bytes)[:-1])
    for part, name in zip(parts, arrays, strict=False):
        part[:] = arrays[name].view(np.uint8)
    if len(payload):
        dist.broadcast(torch.from_numpy(payload), group=group, group_src=0)
    # A copy aligns each array to its own dtype.
    return Batch(**{name: part.copy().view(dtype) for part, (name, dtype) in zip(parts, _DTYPES.items(), strict=True)})
