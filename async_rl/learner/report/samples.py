"""The answers of every evaluation, for reading: `samples/eval_NNNNNN.jsonl` in the run folder, one object per answer.

Owns that folder. Written in a thread of its own, since evaluations are closed under the control plane's lock. Invariant: a
file is whole or absent, and none is of a version that a resumed run has not made; trouble with the disk is a notice.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.data.evaluation import Answered, Evaluation
from async_rl.observability.files import replace_file

CLOSE_S = 30.0  # longest wait for the last file


class Samples:
    def __init__(
        self, folder: Path, resume_step: int | None, decode: Callable[[np.ndarray], str], notice: Callable[[str], None]
    ) -> None:
        """Remove what a life whose work was lost has left: files of versions after `resume_step`; None: a new run."""
        self._folder, self._decode, self._notice = folder, decode, notice
        self._thread: threading.Thread | None = None
        for path in folder.glob("eval_*.jsonl"):
            number = path.stem.removeprefix("eval_")
            if resume_step is not None and number.isdecimal() and int(number) > resume_step:
                try:
                    path.unlink()
                except OSError as e:
                    self._notice(f"{path}, of a version that was lost, could not be removed: {e.strerror}")

    def write(self, evaluation: Evaluation) -> None:
        """Begin to write the answers that came; never waits."""
        version = evaluation.name.version
        if self._thread is not None and self._thread.is_alive():
            self._notice(f"the answers of version {version} are not written: those of an earlier one still are")
            return
        args = (version, evaluation.answered())
        self._thread = threading.Thread(target=self._write, args=args, name="samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._notice(f"the last answers were not written within {CLOSE_S:g} s")

    def _write(self, version: int, answers: list[Answered]) -> None:
        path = self._folder / f"eval_{version:06d}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, "".join(self._line(version, answer) for answer in answers).encode(errors="replace"))
        except OSError as e:
            self._notice(f"the answers of version {version} could not be written to {path} ({e.strerror}): the run goes on")
        except Exception as e:  # a tokenizer's bug: no evaluation is worth a run
            self._notice(f"the answers of version {version} could not be written: {type(e).__name__}: {e}")

    def _line(self, version: int, answer: Answered) -> str:
        trajectory = answer.trajectory
        error = trajectory.error if answer.pinned else f"not sampled by version {version} alone"
        row: dict[str, Any] = {
            "version": version,
            "prompt_id": answer.prompt.prompt_id,
            "prompt": answer.prompt.text,
            "answer": self._decode(trajectory.token_ids),
            "reward": trajectory.reward if math.isfinite(trajectory.reward) else None,
            "scores": trajectory.scores,
            "error": error,
            "finish_reason": trajectory.finish_reason,
            "num_tokens": trajectory.num_tokens,
        }
        return json.dumps(row, ensure_ascii=False) + "\n"
