"""How a vLLM engine is started here: environment, engine arguments, and a core that dies with its parent.

Imports vllm only inside functions, after the environment is set. Invariant: the engine core is a fork of the process
that calls `start`, listens on loopback at most, and cannot outlive that process.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from async_rl.config import Config

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm.v1.engine.async_llm import AsyncLLM

PR_SET_PDEATHSIG = 1
WORKER_EXTENSION = "async_rl.weights.engine.WorkerExt"
# torchrun's: an engine that inherits them takes itself for a rank of the learner.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
FOREIGN_PREFIX = "TORCHELASTIC_"
# Imported before the fork, so that the core inherits them instead of importing them once more.
PREIMPORT = ("vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor", "async_rl.weights.engine")
PREIMPORT_CPU = ("vllm.v1.worker.cpu_worker",)
# vLLM refuses a GPU of which less than this share is free, although an explicit KV cache makes it ignore the share
# afterwards; its default of 0.92 would refuse every card that the learner, or another rollout, is using.
MUST_BE_FREE = 0.01

_forking_core = False
_hook_registered = False


def environment(config: Config, private_dir: str, timeout_s: float, log_level: str) -> dict[str, str]:
    """What must be set before vllm is first imported."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # keeps the CPU platform on the in-core executor; the core is still a process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" would pin every rollout of a host to the same cores
        "OMP_NUM_THREADS": str(config.rollout.threads),
        "VLLM_RPC_BASE_PATH": private_dir,
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(timeout_s))),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": log_level,
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if torch.version.cuda is None:  # else the first log-prob compiles C++, and kills the core where there is no compiler
        env["TORCHDYNAMO_DISABLE"] = "1"
    if config.transport.host.startswith("127."):
        env |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if Path(config.model.path).is_dir():
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return env


def start(config: Config, private_dir: str, timeout_s: float, log_level: str) -> tuple[AsyncLLM, BaseProcess]:
    """A running engine and its core, forked from this thread. Call it early from the main thread: a fork copies no other
    thread, and the core dies when the thread that made it ends."""
    for key in [k for k in os.environ if k in FOREIGN or k.startswith(FOREIGN_PREFIX)]:
        del os.environ[key]
    os.environ.update(environment(config, private_dir, timeout_s, log_level))
    torch.set_num_threads(config.rollout.threads)
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    for module in PREIMPORT + (PREIMPORT_CPU if on_cpu else ()):
        importlib.import_module(module)
    return _fork(engine_args(config, on_cpu), private_dir)


def _fork(arguments: Any, private_dir: str) -> tuple[AsyncLLM, BaseProcess]:
    """A function of its own: something in vllm keeps the frames that were live when it was first imported, and with them
    their variables, so `start` and its caller must not hold the engine in one."""
    from vllm.v1.engine.async_llm import AsyncLLM

    vllm_config = arguments.create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # only now: the line above sets it to spawn on a CPU
    with _core_dies_with_us(), _temporary_files_in(private_dir):
        before = set(multiprocessing.active_children())
        engine = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
        (core,) = set(multiprocessing.active_children()) - before
    return engine, core


def engine_args(config: Config, on_cpu: bool) -> Any:
    """AsyncEngineArgs. Log-probs are those of the distribution sampled from, so temperature is in them."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    max_model_len = config.model.max_model_len
    return AsyncEngineArgs(
        model=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
        dtype="float32" if on_cpu else "bfloat16",
        enforce_eager=on_cpu,
        max_model_len=max_model_len,
        max_num_seqs=config.rollout.max_num_seqs,
        max_num_batched_tokens=max(2048, max_model_len, config.rollout.max_num_seqs),
        kv_cache_memory_bytes=config.rollout.kv_cache_bytes,
        gpu_memory_utilization=MUST_BE_FREE,
        enable_prefix_caching=True,
        # A seeded request whose prompt is split over two steps kills the core on a CPU.
        enable_chunked_prefill=not on_cpu,
        tensor_parallel_size=1,
        generation_config="vllm",
        seed=config.seed,
        skip_tokenizer_init=not config.rollout.stop,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        weight_transfer_config=WeightTransferConfig(backend="async_rl"),
        worker_extension_cls=WORKER_EXTENSION,
    )


def end_token_ids(hf_config: Any, path: str, trust_remote_code: bool) -> list[int]:
    """The union of the end tokens that generation_config.json, config.json (`hf_config`) and the tokenizer at `path` name."""
    from transformers import AutoTokenizer, GenerationConfig

    named: list[int | Iterable[int] | None] = [getattr(hf_config, "eos_token_id", None)]
    with suppress(OSError, ValueError):  # a model folder may lack any of the files: the others must do
        named.append(GenerationConfig.from_pretrained(path).eos_token_id)
    folder = Path(path)
    # From a folder without a tokenizer transformers makes an empty one, whose end token is id 0.
    if not folder.is_dir() or (folder / "tokenizer_config.json").exists():
        named.append(AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code).eos_token_id)
    ids: set[int] = set()
    for entry in named:
        ids.update([] if entry is None else [entry] if isinstance(entry, int) else entry)
    return sorted(ids)


@contextmanager
def _temporary_files_in(private_dir: str) -> Iterator[None]:
    """vLLM leaves files in the temporary directory; the core keeps this one, we go back to ours."""
    before, tempfile.tempdir = (os.environ.get("TMPDIR"), tempfile.tempdir), private_dir
    os.environ["TMPDIR"] = private_dir
    try:
        yield
    finally:
        tempfile.tempdir = before[1]
        if before[0] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before[0]


@contextmanager
def _core_dies_with_us() -> Iterator[None]:
    global _forking_core, _hook_registered
    if not _hook_registered:
        os.register_at_fork(after_in_child=_leave_signals_to_parent)
        _hook_registered = True
    _forking_core = True
    try:
        yield
    finally:
        _forking_core = False


def _leave_signals_to_parent() -> None:
    if _forking_core:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us both, and the handler is the parent's
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
