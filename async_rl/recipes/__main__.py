"""`python -m async_rl.recipes RECIPE --out DIR`: make a model in a process of its own; the last line printed is its recipe as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from async_rl.recipes.tiny import make_tiny


def main() -> None:
    parser = argparse.ArgumentParser(prog="async_rl.recipes", description="Make a model on the spot.")
    parser.add_argument("recipe", choices=["tiny"])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(make_tiny(args.out, args.seed)))


if __name__ == "__main__":
    main()
