"""vLLM's end, inside the worker: our transfer engine, registered by importing this module as the worker extension.

May import vllm. Invariants: the worker's loop never waits for the network (a Receiver's thread does), nothing is loaded
before a whole version has arrived, and after a load every parameter holds exactly the bits that were sent.

It loads in place through the model's own `load_weights`, which fuses and shards by itself. That is right for dense
unquantised models; vLLM's layerwise reload is silently wrong for tied embeddings on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from async_rl.weights.base import WeightsError
from async_rl.weights.checksum import checksum
from async_rl.weights.group import GroupSpec
from async_rl.weights.manifest import MAX_LISTED, Manifest
from async_rl.weights.receiver import Receiver

BACKEND = "async_rl"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Fields of GroupSpec, and Manifest.to_dict(): plain data, because it crosses a process border as MessagePack."""

    spec: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing to say: what is loaded is what was staged."""


class AsyncRLTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """init = join the group and post the receive; update = load what was staged; shutdown = leave."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    receiver: Receiver | None = None
    checksum = ""  # over what the model holds since the last load; equals WeightSource.checksum of the same weights

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        packed = [name for name, parameter in self.model.named_parameters() if parameter.numel() == 0]
        if packed:
            raise WeightsError(
                f"vLLM packed {packed[0]} and {len(packed) - 1} more at load: in-place updates cannot reach them"
            )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Returns at once; the network is the receiver thread's. Raises WeightsError when the manifest does not fit."""
        manifest = Manifest.from_dict(init_info.manifest)
        manifest.check_against({name: (_dtype(t), tuple(t.shape)) for name, t in hf_views(self.model)})
        spec = GroupSpec(**init_info.spec)
        spec = replace(spec, rank=spec.rank + self.parallel_config.rank)
        old = self.receiver
        if old is None or old.spec != spec or old.manifest.digest != manifest.digest:
            self.shutdown()
            self.receiver = Receiver(spec, manifest, pinned=next(self.model.parameters()).is_cuda)
        assert self.receiver is not None
        self.receiver.post()

    def start_weight_update(self) -> None:
        """Nothing to prepare: parameters are written in place."""

    def finish_weight_update(self) -> None:
        """Nothing to undo."""

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load what was staged; raises WeightsError naming the tensors that did not take it."""
        if self.receiver is None:
            raise WeightsError("no weights were prepared")
        self.model.load_weights(self.receiver.tensors())  # type: ignore[operator]
        self.checksum = checksum(hf_views(self.model))
        if self.checksum != self.receiver.checksum:
            held = dict(hf_views(self.model))
            stale = [name for name, tensor in self.receiver.tensors() if not torch.equal(held[name].cpu(), tensor.cpu())]
            raise WeightsError(
                f"vLLM did not take {', '.join(stale[:MAX_LISTED])} ({len(stale)} tensors) from the weights sent"
            )

    def shutdown(self) -> None:
        """Leave the group and free staging memory; what the model holds stays."""
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None


class WorkerExt:
    """Methods added to vLLM's worker, called by collective_rpc. They report errors as data, not as tracebacks."""

    weight_transfer_engine: AsyncRLTransferEngine

    def async_rl_prepare(self, init_info: dict[str, Any]) -> str:
        """vLLM's init_weight_transfer_engine; what does not fit is returned as a sentence, "" when all is well."""
        try:
            self.init_weight_transfer_engine(init_info)  # type: ignore[attr-defined]
        except WeightsError as e:
            return str(e)
        return ""

    def async_rl_arrived(self) -> dict[str, Any]:
        """{"digests": list, or None while some buckets are missing, "error": why they will not come, or ""}."""
        receiver = self.weight_transfer_engine.receiver
        if receiver is None:
            return {"digests": None, "error": "no weights were prepared"}
        try:
            return {"digests": receiver.arrived(), "error": ""}
        except WeightsError as e:
            return {"digests": None, "error": str(e)}

    def async_rl_load(self) -> str:
        """One whole update session of vLLM's, in one call because the engine is paused meanwhile; returns the checksum."""
        worker: Any = self
        if worker._weight_update_active:  # left open by a session that broke off
            worker.finish_weight_update()
        worker.start_weight_update()
        worker.update_weights({})
        worker.finish_weight_update()
        return self.weight_transfer_engine.checksum


def hf_views(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, view) of every parameter: fused ones cut into their parts, vocabulary padding cut off, tied ones
    once. The shapes are the full ones, so they fit a manifest, as long as the engine has a single tensor-parallel rank."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        module: Any = model.get_submodule(path)
        parent, _, last = path.rpartition(".")
        data = parameter.detach()
        if last in packed and hasattr(module, "output_sizes"):
            parts = data.split(list(module.output_sizes))
            yield from ((f"{parent}.{part}.{leaf}", view) for part, view in zip(packed[last], parts, strict=True))
        elif hasattr(module, "org_vocab_size"):
            yield name, data[: module.org_vocab_size]
        else:
            yield name, data


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _unpacked_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


if current_platform.is_cpu():
    # Else oneDNN packs the weights at load and leaves an empty parameter, which cannot be updated.
    layer_utils.dispatch_cpu_unquantized_gemm = _unpacked_linear
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, AsyncRLTransferEngine)
