"""The learner's end: names, ties, bytes and checksum; and the same over sharded parameters."""

from __future__ import annotations

import multiprocessing
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from async_rl.weights.checksum import checksum
from async_rl.weights.source import WeightSource, plain_name


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_all(source: WeightSource) -> dict[str, bytes]:
    """What a receiver would cut out of the stream; each bucket is copied before the next but one is gathered."""
    stream = b""
    for k in range(len(source.manifest.buckets)):
        bucket = source.gather(k)
        assert bucket is not None and bucket.dtype == torch.uint8
        stream += bucket.numpy().tobytes()
    manifest = source.manifest
    return {s.name: stream[o : o + s.num_bytes] for o, s in zip(manifest.offsets, manifest.tensors, strict=True)}


def test_every_dtype_arrives_bit_equal_also_when_a_tensor_spans_many_buckets():
    torch.manual_seed(0)
    named = [
        ("f32", torch.randn(70, 33)),
        ("bf16", torch.randn(5).bfloat16()),
        ("f16", torch.randn(3, 3).half()),
        ("i64", torch.arange(7)),
        ("flags", torch.randn(9) > 0),
        ("scalar", torch.tensor(2.5)),
        ("f8", torch.randn(11).to(torch.float8_e4m3fn)),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        source = WeightSource(named, dtype, bucket_bytes=1024)
        got = read_all(source)
        sent = {name: t.to(dtype) if t.is_floating_point() else t for name, t in named}
        assert got == {name: bytes_of(t) for name, t in sent.items()}
        assert source.checksum() == checksum(sent.items())


def test_a_second_pass_reads_the_parameters_anew():
    weight = torch.nn.Parameter(torch.zeros(10))
    source = WeightSource([("w", weight)], torch.float32, 4096)
    before = (read_all(source), source.checksum())
    weight.data += 1
    assert (read_all(source), source.checksum()) != before
    assert source.checksum() == checksum([("w", torch.ones(10))])


def test_a_pass_that_was_given_up_leaves_nothing_stale_for_the_next():
    weight = torch.nn.Parameter(torch.zeros(5000))
    source = WeightSource([("w", weight)], torch.bfloat16, 4096)
    source.gather(0)  # a tensor of several buckets is kept for the next one
    weight.data += 1
    assert read_all(source)["w"] == bytes_of(torch.ones(5000).bfloat16())


def test_a_tied_tensor_is_sent_once_and_named_as_a_tie():
    weight = torch.randn(4, 2)
    source = WeightSource([("embed.weight", weight), ("norm", torch.ones(2)), ("head.weight", weight)], torch.float32, 4096)
    assert [t.name for t in source.manifest.tensors] == ["embed.weight", "norm"]
    assert source.manifest.ties == {"head.weight": "embed.weight"}


@pytest.mark.parametrize(
    "wrapped",
    [
        "_orig_mod.model.layers.0.weight",
        "module.model.layers.0.weight",
        "model._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.weight",
        "base_model.model.model.layers.0.weight",
        "module._orig_mod.model.layers.0.weight",
    ],
)
def test_what_wraps_a_model_does_not_show_in_the_names(wrapped):
    assert plain_name(wrapped) == "model.layers.0.weight"


def test_a_checksum_before_a_full_pass_is_an_error():
    source = WeightSource([("a", torch.ones(2000)), ("b", torch.ones(2000))], torch.float32, 4096)
    source.gather(0)
    with pytest.raises(ValueError, match="1 of 2"):
        source.checksum()


def test_a_rank_that_is_not_root_keeps_no_bytes():
    assert WeightSource([("a", torch.ones(2000))], torch.float32, 4096, root=False).gather(0) is None


def test_the_checksum_sees_a_swapped_name_a_moved_row_and_a_flipped_bit_but_not_the_order():
    a, b = torch.randn(6, 3), torch.randn(6, 3)
    base = checksum([("a", a), ("b", b)])
    assert checksum([("b", b), ("a", a)]) == base
    assert checksum([("a", b), ("b", a)]) != base
    assert checksum([("a", a.flip(0)), ("b", b)]) != base
    flipped = a.clone()
    flipped.view(torch.int32)[2, 1] ^= 1
    assert checksum([("a", flipped), ("b", b)]) != base


def shard_and_gather(rank: int, store_path: Path, out) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    store = dist.FileStore(str(store_path), 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    whole = {"a": torch.randn(301, 8), "b": torch.randn(3), "c": torch.randn(1, 5)}
    mesh = init_device_mesh("cpu", (2,))
    named = [(name, distribute_tensor(t, mesh, [Shard(0)])) for name, t in whole.items()]
    gathers, original = [0], DTensor.full_tensor

    def counted(self, *args, **kwargs):
        gathers[0] += 1
        return original(self, *args, **kwargs)

    DTensor.full_tensor = counted
    source = WeightSource(named, torch.bfloat16, 1024, root=rank == 0)
    stream, num_empty = b"", 0
    for k in range(len(source.manifest.buckets)):
        bucket = source.gather(k)
        stream += b"" if bucket is None else bucket.numpy().tobytes()
        num_empty += bucket is None
    right = all(
        stream[o : o + s.num_bytes] == bytes_of(whole[s.name].bfloat16())
        for o, s in zip(source.manifest.offsets, source.manifest.tensors, strict=True)
    )
    out.put((rank, right if rank == 0 else None, num_empty, gathers[0], len(source.manifest.buckets)))
    dist.destroy_process_group()


@pytest.mark.process
def test_sharded_parameters_are_gathered_once_each_by_all_ranks_in_step(tmp_path):
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    ranks = [context.Process(target=shard_and_gather, args=(rank, tmp_path / "store", out)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        results = sorted(out.get(timeout=60) for _ in ranks)
    finally:
        deadline = time.monotonic() + 10
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
    assert results == [(0, True, 0, 3, 5), (1, None, 5, 3, 5)]
