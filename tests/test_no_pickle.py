"""Nothing that arrives is ever unpickled or run: the source is searched for it, and the wire works where pickle is broken."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from async_rl.learner.checkpoints.checkpoint import Checkpointer, CheckpointError
from async_rl.learner.checkpoints.shard_index import ShardReader

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "async_rl").rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "broadcast_object_list", "all_gather_object", "gather_object"}
LOADERS = {"load", "load_all", "full_load", "unsafe_load"}  # of yaml

EXCEPTIONS = {
    (
        "learner/checkpoints/checkpoint.py",
        "imports pickle",
    ): "names an error; nothing is loaded with it",
    (
        "learner/checkpoints/shard_index.py",
        "imports pickle",
    ): "torch's index of shards, through a reader that admits its own classes only",
}


def found_in(source: str) -> Iterator[str]:
    """What this source does that it should not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"imports {name.partition('.')[0]}" for name in names if name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(call: ast.Call) -> Iterator[str]:
    words = {k.arg: k.value.value if isinstance(k.value, ast.Constant) else k.value for k in call.keywords}
    whole = ast.unparse(call.func)
    last = whole.rpartition(".")[2]
    if whole in ("eval", "exec", "compile", "__import__"):
        yield f"calls {whole}"
    if last in METHODS:
        yield f"calls {last}"
    if words.get("allow_pickle", False) is not False:
        yield "allows pickle"
    if whole == "torch.load" and words.get("weights_only") is not True:
        yield "torch.load without weights_only=True"
    if whole.startswith("yaml.") and last in LOADERS and "Safe" not in ast.unparse(call):
        yield f"calls {whole}"
    if words.get("trust_remote_code") is True:
        yield "trusts remote code"


def test_no_source_unpickles_or_runs_what_it_is_given() -> None:
    found = {(str(p.relative_to(ROOT / "async_rl")), what) for p in SOURCES for what in found_in(p.read_text())}
    assert found == set(EXCEPTIONS)


BAD = """
import marshal, numpy as np, torch, yaml
from dill import loads
socket.recv_pyobj()
np.load(path, allow_pickle=True)
torch.load(path)
torch.load(path, weights_only=False)
yaml.load(text, Loader=yaml.Loader)
eval(text)
AutoModel.from_pretrained(name, trust_remote_code=True)
"""
GOOD = """
torch.load(path, weights_only=True)
yaml.load(text, Loader=yaml.SafeLoader)
yaml.safe_load(text)
model.eval()
AutoModel.from_pretrained(name, trust_remote_code=config.trust_remote_code)
np.load(path, allow_pickle=False)
"""


def test_the_search_finds_what_it_is_for() -> None:
    assert len(list(found_in(BAD))) == 9
    assert list(found_in(GOOD)) == []


WIRE = """
import asyncio, pickle, sys, threading
from pathlib import Path
import _pickle

def broken(*args, **kwargs):
    raise SystemExit("something was unpickled")

pickle.load = pickle.loads = pickle.Unpickler = _pickle.load = _pickle.loads = _pickle.Unpickler = broken

from async_rl.transport.base import Delivered, Said
from async_rl.transport.keys import make_keys, read_learner_keys, read_rollout_keys
from async_rl.transport.messages import PROTOCOL, Ack, Hello, Lease, Welcome
from async_rl.transport.zmq import ZmqHub, ZmqLink
from tests.transport_samples import MAX_BYTES, assert_same_group, make_group

folder = Path(sys.argv[1])
make_keys(folder)
hub = ZmqHub("127.0.0.1", 0, max_message_bytes=MAX_BYTES, keys=read_learner_keys(folder))
done, answers = threading.Event(), []

def learner():
    peer = None
    while not done.is_set():
        for event in hub.poll(0.05):
            if isinstance(event, Said) and isinstance(event.message, Hello):
                peer = event.peer
                hub.send(peer, Welcome(rollout_id="r#1", incarnation=1, version=0, data_address=hub.data_address))
                hub.send(peer, Lease(
                    group_id=7, attempt=(2, 1), split="train", born=(1, 0), prompt_id="p", prompt_ids=[1, 2], text="x",
                    fields={"target": 3}, num_samples=1, max_new_tokens=1, temperature=1, seed=0, timeout_s=1,
                ))
            elif isinstance(event, Delivered):
                assert_same_group(event.group, make_group(7))
                hub.send(peer, Ack(group_id=7, attempt=(2, 1), outcome="accepted"))

async def rollout():
    link = ZmqLink(hub.control_address, max_message_bytes=MAX_BYTES, keys=read_rollout_keys(folder))
    async with asyncio.timeout(60):
        await link.send(Hello(
            protocol=PROTOCOL, run_id="r", config_digest="c", tokenizer_digest="t", name="rollout-0", num_slots=1))
        welcome, lease = await link.recv(), await link.recv()
        link.open_data(welcome.data_address)
        await link.push(make_group(lease.group_id))
        ack = await link.recv()
    link.close(0)
    print(welcome.kind, lease.kind, ack.outcome, flush=True)

thread = threading.Thread(target=learner)
thread.start()
try:
    asyncio.run(rollout())
finally:
    done.set()
    thread.join()
    hub.close(0)
"""


@pytest.mark.process
def test_a_rollout_joins_leases_and_delivers_where_pickle_is_broken(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", WIRE, str(tmp_path / "keys")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=110, start_new_session=True)
    assert (done.returncode, done.stdout) == (0, "welcome lease accepted\n"), done.stderr


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_the_index_of_a_checkpoint_is_read_without_running_what_it_says(tmp_path: Path) -> None:
    tensors = {"model.w": torch.arange(6.0).reshape(2, 3), "model.half": torch.ones(3, dtype=torch.bfloat16)}
    folder = Checkpointer(tmp_path, keep=1).save(1, tensors, b"extra")
    ours, theirs = ShardReader(folder).read_metadata(), FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata and ours.storage_data == theirs.storage_data
    trap = tmp_path / "trap"
    for evil in (Evil(trap), {"state_dict_metadata": Evil(trap)}):
        (folder / ".metadata").write_bytes(pickle.dumps(evil))
        with pytest.raises(CheckpointError, match=r"its index names (posix|nt)\.mkdir, which no index needs"):
            Checkpointer(tmp_path, keep=1).load(folder, dict(tensors))
        assert not trap.exists()
    (folder / ".metadata").write_bytes(pickle.dumps({"no": "index"}))
    with pytest.raises(CheckpointError, match="its index is no index"):
        Checkpointer(tmp_path, keep=1).load(folder, dict(tensors))
    assert json.loads((folder / "manifest.json").read_text())["step"] == 1
