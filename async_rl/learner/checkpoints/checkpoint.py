"""Checkpoints: written beside, renamed into place, verified before use, pruned last.

Owns the folder `checkpoints/`, but for `best` in it, and the names under which tensors are kept there; imports torch
(distributed checkpoint) and observability.
Invariants: a folder named step_NNNNNN was complete when it got that name and its manifest says what it must hold; no
failure, at whatever write, harms an older one; a state that is not finite is never written. All methods are collective, and may
be called in any one thread at a time.
The folder must be one that you trust, though torch's index of shards, a pickle, is read without trust (shard_index.py).
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from async_rl.learner import LearnerError
from async_rl.learner.checkpoints.shard_index import ShardReader
from async_rl.observability.files import replace_file, sync_folder, write_file
from async_rl.observability.log import get_logger

_EXTRA, _MANIFEST, _LATEST = "state.msgpack", "manifest.json", "latest"
_INDEX, _SHARD = ".metadata", ".distcp"  # as torch names its files
_MODEL, _CRITIC = "model.", "critic."  # begin the keys of a model's tensors; those of optimizers begin otherwise
# What torch raises for a checkpoint of another model, or for an index that is no index.
_UNREADABLE = (CheckpointException, OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError)
_log = get_logger(__name__)


class CheckpointError(LearnerError):
    """A checkpoint that could not be written or used; nothing older was harmed. Raised on all ranks alike."""


class Checkpointer:
    """`group` (gloo) holds the learner's ranks; None means a single process. `keep` complete checkpoints stay, and those of
    the steps in `spared`, which only rank 0 needs to know."""

    def __init__(self, directory: Path, keep: int, group: dist.ProcessGroup | None = None) -> None:
        self.directory = directory
        self.keep = keep
        self.spared: set[int] = set()
        self.skipped: list[str] = []  # by `latest_complete`, newest first: a sentence each; known to rank 0
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        self.num_ranks = dist.get_world_size(group) if group else 1

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        extra: bytes | None,
        rng: dict[str, Tensor] | None = None,
        first: Callable[[], None] | None = None,
    ) -> Path:
        """Write tensors, RNG and rank 0's `extra`; returns the folder. Raises CheckpointError on every rank.

        Keys are equal on all ranks; a DTensor is kept whole, of any other tensor one rank's. `rng`: what `rng_states` gave when
        the tensors were copied; None: now. `first` is done before anything is written, on rank 0.
        """
        final, partial = step_folder(self.directory, step), self.directory / f".step_{step:06d}.partial"
        self._agree(lambda: _require_finite(tensors), f"checkpoint of step {step} is not written")
        tensors = tensors | {f"rng.{name}.rank{self.rank}": state for name, state in (rng or rng_states()).items()}
        try:
            self._on_root(first or (lambda: None))
            self._on_root(lambda: self._begin(partial))
            self._write_shards(tensors, partial)
            self._on_root(lambda: self._finish(partial, final, extra))
        except (CheckpointException, CheckpointError) as e:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                self._restore_aside()
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.directory} ({_cause(e)}): older ones are intact; "
                "free space or mend the folder"
            ) from None
        return final

    def latest_complete(self) -> Path | None:
        """The newest checkpoint whose files match its manifest; None without any. Clears what a crash left behind.

        Raises CheckpointError when there are checkpoints and none can be used: to start over would cost the run its past.
        """
        found = [-1]

        def look() -> None:
            self._recover()
            folders, why = checkpoints(self.directory), ""
            for folder in reversed(folders):
                problem = problem_of(folder)
                if not problem:
                    found[0] = step_of(folder)
                    return
                why = why or problem
                self.skipped.append(f"checkpoint of version {step_of(folder)} is skipped: {problem}")
                _log.warning("%s", self.skipped[-1])
            if folders:
                raise CheckpointError(
                    f"{self.directory} holds no checkpoint that can be used, the newest ({folders[-1].name}) because {why}: "
                    "restore one, or start anew with checkpoint.resume=false or another run_dir"
                )

        self._on_root(look)
        if self.group is not None:
            word = torch.tensor(found, dtype=torch.int64)
            dist.broadcast(word, group=self.group, group_src=0)
            found = word.tolist()
        return step_folder(self.directory, found[0]) if found[0] >= 0 else None

    def load(self, folder: Path, tensors: dict[str, Tensor]) -> bytes | None:
        """Fill tensors and RNG in place, whatever the number of ranks that saved; returns `extra`.

        What else the checkpoint holds is left alone, such as a critic that the run no longer trains. With another number of
        ranks, RNG streams that were not saved stay as they are. Raises CheckpointError.
        """
        rng = {f"rng.{name}.rank{self.rank}": state for name, state in rng_states().items()}
        try:
            reader = ShardReader(folder)
            saved = reader.read_metadata().state_dict_metadata
            if _any_critic(tensors) and not _any_critic(saved):
                raise CheckpointError(
                    f"checkpoint {folder} holds no critic, which algorithm.advantage asks for at this point: resume with the "
                    "advantage it was made with, or begin another run_dir"
                )
            rng = {name: state for name, state in rng.items() if name in saved}
            with _alone_is_fine():
                load({**tensors, **rng}, storage_reader=reader, process_group=self.group, no_dist=self.group is None)
            extra = (folder / _EXTRA).read_bytes() if (folder / _EXTRA).exists() else None
        except _UNREADABLE as e:
            raise CheckpointError(
                f"checkpoint {folder} does not fit this run ({_cause(e)}): use the model it was made from, or another run_dir"
            ) from None
        for name, state in rng.items():
            _set_rng_state(name.split(".")[1], state)
        return extra

    # What rank 0 does to the folder.

    def _begin(self, partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def _finish(self, partial: Path, final: Path, extra: bytes | None) -> None:
        if extra is not None:
            write_file(partial / _EXTRA, extra)
        manifest = {"step": step_of(final), "num_ranks": self.num_ranks, "files": _digests(partial)}
        write_file(partial / _MANIFEST, json.dumps(manifest, indent=1).encode())
        sync_folder(partial)
        if final.exists():
            final.rename(self._aside(final))
        partial.rename(final)
        sync_folder(self.directory)
        replace_file(self.directory / _LATEST, final.name.encode() + b"\n")
        self._prune(final)

    def _prune(self, newest: Path) -> None:
        """Keep `newest`, the keep-1 before it, and the spared. What is numbered after it is of a timeline that was given up."""
        folders = checkpoints(self.directory)
        at = folders.index(newest)
        old = [folder for folder in folders[: max(0, at - self.keep + 1)] if step_of(folder) not in self.spared]
        doomed = [*old, *folders[at + 1 :], *self.directory.glob(".step_*.aside")]
        for folder in doomed:
            shutil.rmtree(folder, ignore_errors=True)
            if folder in folders[at + 1 :]:
                _log.warning(
                    "checkpoint %s is removed: the run went on from an older one and has now saved %s", folder, newest.name
                )

    def _restore_aside(self) -> None:
        """A folder that was to be replaced by another of the same step gets its name back, if the other never came."""
        for aside in self.directory.glob(".step_*.aside"):
            final = self.directory / aside.name.removeprefix(".").removesuffix(".aside")
            if not final.exists():
                aside.rename(final)

    def _recover(self) -> None:
        self._restore_aside()
        for rest in [*self.directory.glob(".step_*.partial"), *self.directory.glob(".step_*.aside")]:
            _log.warning("%s is removed: the process that wrote it ended before it was complete", rest)
            shutil.rmtree(rest, ignore_errors=True)

    def _aside(self, final: Path) -> Path:
        return self.directory / f".{final.name}.aside"

    # How ranks agree.

    def _write_shards(self, tensors: dict[str, Tensor], partial: Path) -> None:
        with _alone_is_fine():
            metadata = save(
                tensors,
                storage_writer=FileSystemWriter(partial, sync_files=True),
                process_group=self.group,
                no_dist=self.group is None,
            )
        paths = {info.relative_path for info in (metadata.storage_data or {}).values()}

        def require_all() -> None:
            missing = [path for path in paths if not (partial / path).exists()]
            if missing:
                raise OSError(f"rank 0 does not see {missing[0]} of another rank: the folder must be shared by all hosts")

        self._on_root(require_all)

    def _on_root(self, action: Callable[[], None]) -> None:
        self._agree(action if self.rank == 0 else lambda: None, "")

    def _agree(self, action: Callable[[], None], what: str) -> None:
        """Run the action; when it failed on any rank, raise that rank's sentence on all."""
        problem = ""
        try:
            action()
        except (OSError, CheckpointError) as e:
            problem = f"{what}: {e}" if what else str(e)
        if self.group is not None:
            texts = torch.zeros(self.num_ranks, 1024, dtype=torch.uint8)
            own = problem.encode()[:1024]
            texts[self.rank, : len(own)] = torch.tensor(list(own), dtype=torch.uint8)
            dist.all_reduce(texts, op=dist.ReduceOp.MAX, group=self.group)
            said = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in texts]
            problem = next((s for s in said if s), "")
        if problem:
            raise CheckpointError(problem)


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Without torch's warning that torch.distributed is uninitialized."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


def checkpoints(directory: Path) -> list[Path]:
    """Their folders by step, oldest first, whether they verify or not."""
    return sorted((p for p in directory.glob("step_*") if p.name[5:].isdecimal()), key=step_of)


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def holds_critic(folder: Path) -> bool:
    """Raises CheckpointError when the checkpoint cannot be read."""
    try:
        return _any_critic(ShardReader(folder).read_metadata().state_dict_metadata)
    except _UNREADABLE as e:
        raise CheckpointError(f"checkpoint {folder} cannot be read ({_cause(e)}): mend it, or begin another run_dir") from None


def _any_critic(keys: Iterable[str]) -> bool:
    return any(key.startswith(_CRITIC) for key in keys)


def read_model(folder: Path, named: Iterable[tuple[str, Tensor]]) -> None:
    """Fill these parameters, by Hugging Face name, without a process group; the optimizer's state is not read.

    Raises CheckpointError when the checkpoint cannot be read or is of another model.
    """
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in named}
    try:
        reader = ShardReader(folder)
        saved = {key for key in reader.read_metadata().state_dict_metadata if key.startswith(_MODEL)}
        if odd := sorted(saved ^ tensors.keys()):
            raise ValueError(f"{odd[0]} is in one of the two only")
        with _alone_is_fine():
            load(tensors, storage_reader=reader, no_dist=True)
    except _UNREADABLE as e:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read into its model ({_cause(e)}): model.path holds another now, or the run has "
            "removed the checkpoint meanwhile"
        ) from None


def problem_of(folder: Path) -> str:
    """ "" when the folder holds exactly what its manifest says, else what is wrong."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        expected = manifest["files"]
        if absent := _unnamed(expected):
            return f"{_MANIFEST} names no {absent}"
        for name, entry in expected.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (folder / name).stat().st_size != entry["bytes"] or _sha256(folder / name) != entry["sha256"]:
                return f"{name} does not match its digest"
    except OSError as e:
        return f"it cannot be read ({e})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} is damaged"
    return ""


def _unnamed(files: Iterable[str]) -> str:
    """What a manifest must name and these do not, or ""."""
    names = list(files)
    kinds = (_EXTRA, _INDEX, f"shard (*{_SHARD})")
    there = (_EXTRA in names, _INDEX in names, any(name.endswith(_SHARD) for name in names))
    return next((kind for kind, found in zip(kinds, there, strict=True) if not found), "")


def _require_finite(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not torch.isfinite(local).all():
            raise CheckpointError(f"{name} is not finite")


def _digests(folder: Path) -> dict[str, dict[str, str | int]]:
    files = sorted(p for p in folder.iterdir() if p.is_file())
    return {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rng_states() -> dict[str, Tensor]:
    """Of this rank's generators, by kind."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng_state(name: str, state: Tensor) -> None:
    if name == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        failed = next(iter(error.failures.items()), None)
        return f"rank {failed[0]}: {failed[1][0]}" if failed else "unknown"
    return " ".join(str(error).split())[:300]
