"""What this host has: cores, GPUs, memory, and how large the model in a folder is. Reads files, and nvidia-smi if need be.

Imports launcher.folder, launcher.memory and launcher.plan only. Invariant: answers within SMI_DEADLINE_S, without CUDA, and
says "unknown" (an absent entry, None) instead of guessing.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import psutil

from async_rl.launcher.folder import read_header
from async_rl.launcher.memory import HOST, ModelSize
from async_rl.launcher.plan import Machine

SMI_DEADLINE_S = 2.0


def find_machine() -> Machine:
    """This host as the plan sees it; counts GPUs without CUDA."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Machine(tuple(cores), _find_gpus(), os.environ)


def _find_gpus() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    devices = [p.name for p in Path("/dev").glob("nvidia[0-9]*")]
    return tuple(str(i) for i in range(len(devices)))


def memory_limits(machine: Machine) -> dict[str, int]:
    """Bytes a run may take, by device as launcher.memory names it; devices nobody knows anything of are absent."""
    limits = {HOST: min([psutil.virtual_memory().available, *cgroup_left(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])}
    if machine.gpus:
        limits |= {f"GPU {name}": num_bytes for name, num_bytes in _gpu_bytes().items() if name in machine.gpus}
    return limits


def cgroup_left(root: Path, own: Path) -> list[int]:
    """Bytes left below each limit of this process's control group (v1 or v2) and those above it; page cache counts as free."""
    try:
        paths = dict(line.split(":", 2)[1:] for line in own.read_text().splitlines())  # by controllers; "" is v2's
    except (OSError, ValueError):
        return []
    files = ("memory.max", "memory.current")
    if "memory" in paths:
        root, files = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
    lowest = root / paths.get("memory", paths.get("", "/")).lstrip("/")
    found = []
    for folder in [lowest, *lowest.parents]:
        if folder.is_relative_to(root):
            try:
                limit, used = ((folder / name).read_text().strip() for name in files)
                if limit != "max":
                    found.append(max(0, int(limit) - int(used) + _reclaimable(folder / "memory.stat")))
            except (OSError, ValueError):
                continue
    return found


def _reclaimable(stat: Path) -> int:
    entries = dict(line.split() for line in stat.read_text().splitlines())
    return int(entries.get("total_inactive_file", entries.get("inactive_file", 0)))


def _gpu_bytes() -> dict[str, int]:
    """Total memory by index and by UUID; empty when nvidia-smi is absent, fails or takes too long."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_DEADLINE_S)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
        return {name: int(mib) << 20 for index, uuid, mib in rows for name in (index, uuid)}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}


def model_size(folder: Path) -> ModelSize | None:
    """From the headers of its safetensors files and config.json; None when they are not there or cannot be read."""
    try:
        tensors = {name: t for file in folder.glob("*.safetensors") for name, t in read_header(file)[1].items()}
        counts = {name: math.prod(t["shape"]) for name, t in tensors.items()}
        tree = json.loads((folder / "config.json").read_text())
        vocab_size = tree.get("vocab_size") or tree["text_config"]["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not counts:
        return None
    return ModelSize(sum(counts.values()), max(counts.values()), int(vocab_size), counts.get("lm_head.weight", 0))
