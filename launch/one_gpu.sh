#!/usr/bin/env bash
# The quickstart with learner and rollout on one NVIDIA GPU; arguments are overrides, for example num_steps=40.
# Needs Linux x86-64, the NVIDIA driver, about 4 GiB of GPU memory, and `make setup GPU=1` (docs/one_gpu.md).
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v nvidia-smi >/dev/null; then
    echo "one_gpu.sh: there is no nvidia-smi here: install the NVIDIA driver, or run make quickstart, which needs no GPU" >&2
    exit 2
fi
visible="${CUDA_VISIBLE_DEVICES:-0}"
export CUDA_VISIBLE_DEVICES="${visible%%,*}"
exec .venv/bin/python -m async_rl train configs/quickstart.yaml learner.device=cuda "$@"
