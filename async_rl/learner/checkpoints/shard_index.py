"""The index of a checkpoint's shards, which torch writes as a pickle, read without trust in what it says.

Owns the list of what such a pickle may name; imports torch. Invariant: nothing but the classes that describe tensors and files
is made by reading an index, and nothing is called but their constructors.
"""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.serialization import _get_layout

_KNOWN = (
    *(described.Metadata, described.MetadataIndex, described.StorageMeta, described.ChunkStorageMetadata),
    *(described.TensorStorageMetadata, described.BytesStorageMetadata, described.TensorProperties),
    *(described._MEM_FORMAT_ENCODING, _StorageInfo, _get_layout, torch.Size, pathlib.PosixPath, pathlib.WindowsPath),
)
_ALLOWED: dict[tuple[str, str], Any] = {(known.__module__, known.__qualname__): known for known in _KNOWN}
_ALLOWED["pathlib", "PosixPath"] = pathlib.PosixPath  # as Pythons before 3.13 write it


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        dtype = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"its index names {module_name}.{global_name}, which no index needs") from None


class ShardReader(FileSystemReader):
    """torch's reader of a checkpoint folder, but for its index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("its index is no index")
        meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        metadata.storage_meta = meta
        return metadata
