"""What rank 0 does before it leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.learner import LearnerError
from async_rl.learner.lead import next_incarnation


def test_each_life_counts_one_more_than_the_last(tmp_path: Path) -> None:
    assert [next_incarnation(tmp_path) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("damaged", [b"", b"7x", b"\xff\xfe", b"1.5"])
def test_a_damaged_count_of_lives_is_told_and_not_guessed(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "incarnation"
    path.write_bytes(damaged)
    with pytest.raises(LearnerError, match=r"incarnation is damaged: write the highest incarnation in metrics\.jsonl into it"):
        next_incarnation(tmp_path)
    assert path.read_bytes() == damaged
