"""The prompt stream: which prompt comes next, for ever.

Owns the order of the data and the cursor in it. Imports numpy and async_rl.types only. Invariant: the order of epoch e
follows from (seed, e) alone, so a resumed run goes on exactly where it was, and each epoch holds every prompt once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl.types import Prompt


class PromptError(Exception):
    """Prompts that cannot be drawn from, or a checkpoint of other prompts; one sentence."""


class PromptStream:
    """Every epoch is a fresh permutation of `prompts`. Raises PromptError for an empty sequence."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise PromptError("there is no training prompt: raise data.num_items, or lower data.heldout_fraction")
        self._prompts = prompts
        self._seed = seed
        self._digest = digest(prompts)
        self._go_to(epoch=0, cursor=0)

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete."""
        return self._epoch

    @property
    def num_drawn(self) -> int:
        """Prompts handed out since the run began."""
        return self._epoch * len(self._prompts) + self._cursor

    def next(self) -> Prompt:
        """The next prompt; never ends."""
        prompt = self._prompts[self._order[self._cursor]]
        last = self._cursor + 1 == len(self._prompts)
        if last:
            self._go_to(self._epoch + 1, 0)
        else:
            self._cursor += 1
        return prompt

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"epoch": self._epoch, "cursor": self._cursor, "seed": self._seed, "num_prompts": len(self._prompts)} | {
            "digest": self._digest
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was saved. Raises PromptError if it was saved with other prompts or another seed: a
        cursor into one order means nothing in another."""
        if state["digest"] != self._digest:
            raise PromptError(
                f"the checkpoint was made with {state['num_prompts']} prompts (digest {state['digest']}), the data now gives "
                f"{len(self._prompts)} (digest {self._digest}): restore the seed, the `data` section and its files, or start a "
                "new run_dir"
            )
        if state["seed"] != self._seed:
            raise PromptError(
                f"the checkpoint was made with seed={state['seed']}, not {self._seed}: restore the seed, or start a new run_dir"
            )
        self._go_to(state["epoch"], state["cursor"])

    def _go_to(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))


def digest(prompts: Sequence[Prompt]) -> str:
    """16 hex digits over ids, tokens, texts and fields of the prompts, in order."""
    sha = hashlib.sha256()
    for p in prompts:
        head = json.dumps([p.prompt_id, len(p.token_ids), p.text, p.fields], sort_keys=True, ensure_ascii=False)
        sha.update(head.encode() + np.asarray(p.token_ids, np.int32).tobytes())
    return sha.hexdigest()[:16]
