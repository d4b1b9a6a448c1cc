"""Run metadata that need no framework: command, environment, packages, machine, time; never a secret.

Environment variables are taken by an allow-list; what looks like a secret, and the name of the home folder,
is taken out of texts; host and user names are not read.
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from itertools import pairwise
from typing import Any, Final

HIDDEN: Final = "[hidden]"

PACKAGES: Final = (
    "accelerate",
    "coreai-core",
    "coreai-torch",
    "diffusers",
    "max",
    "numpy",
    "peft",
    "safetensors",
    "tensorcap",
    "tokenizers",
    "torch",
    "torchvision",
    "transformers",
    "triton",
)
_ENVIRONMENT: Final = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "DNNL_DEFAULT_FPMATH_MODE",
    "HF_HUB_OFFLINE",
    "HIP_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "MODULAR_DEBUG",
    "MODULAR_DEBUG_DEVICE_ALLOCATOR",
    "NEURON_CC_FLAGS",
    "NEURON_RT_NUM_CORES",
    "NEURON_RT_VISIBLE_CORES",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTORCH_NVFUSER_DISABLE",
    "PYTORCH_TUNABLEOP_ENABLED",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRANSFORMERS_OFFLINE",
    "WORLD_SIZE",
    "XLA_FLAGS",
)

_SECRET_WORDS: Final = frozenset(
    (
        "apikey",
        "auth",
        "authorization",
        "bearer",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "pat",
        "pwd",
        "secret",
        "secrets",
        "token",
    )
)
_SECRET_PAIRS: Final = frozenset(
    {("access", "key"), ("api", "key"), ("private", "key"), ("secret", "key"), ("account", "key")}
)
_TOKEN_KEYS: Final = frozenset({"access_token", "api_token", "auth_token", "hf_token", "use_auth_token"})
_SECRETS: Final = re.compile(
    r"""
      \b hf_[A-Za-z0-9]{10,}
    | \b sk-[A-Za-z0-9_-]{10,}
    | \b (?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{10,}
    | \b github_pat_\w{10,}
    | \b glpat-[\w-]{10,}
    | \b xox[abeoprs]-[\w-]{10,}
    | \b (?:AKIA|ASIA)[0-9A-Z]{12,}
    | \b AIza[\w-]{20,}
    | \b eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+                        # JSON web token
    | (?<=://) [^/\s:@]* : [^/\s@]+ (?=@)                       # user:password@
    | (?<=[Bb]earer\ ) [\w.~+/=-]{8,}
    | (?<=[?&]) (?i:[\w-]*(?:token|signature|credential|secret|password|api_?key)[\w-]*) = [^&\s"']+
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT: Final = re.compile(r"(-{0,2}[A-Za-z][\w.-]*)=(.*)", re.DOTALL)


def redact(text: str) -> str:
    """Hide what looks like a secret, and the home folder, which often has the user's name.

    Example:
        >>> redact("https://me:pw@example.org/x hf_abcdefghijkl")
        'https://[hidden]@example.org/x [hidden]'
    """
    home = os.path.expanduser("~")
    if len(home) > 1 and home in text:
        text = re.sub(re.escape(home) + r"(?![\w.-])", "~", text)
    return _SECRETS.sub(HIDDEN, text)


def redact_command(arguments: Sequence[str]) -> list[str]:
    """Redact a command line, and hide the values of options with secrets, whatever they look like.

    Example:
        >>> redact_command(["run.py", "--api-key", "abc", "--hf-token=abc", "--max-new-tokens", "4"])
        ['run.py', '--api-key', '[hidden]', '--hf-token=[hidden]', '--max-new-tokens', '4']
    """
    out: list[str] = []
    hide_next = False
    for argument in arguments:
        if hide_next and not (argument.startswith("--") and len(argument) > 2):
            out.append(HIDDEN)
            hide_next = False
            continue
        hide_next = False
        assignment = _ASSIGNMENT.fullmatch(argument)
        if assignment and _is_secret_name(assignment[1]):
            out.append(f"{assignment[1]}={HIDDEN}")
            continue
        hide_next = argument.startswith("-") and not assignment and _is_secret_name(argument)
        out.append(redact(argument))
    return out


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change results; no other is read."""
    return {name: redact(variables[name]) for name in _ENVIRONMENT if name in variables}


def describe_process() -> dict[str, Any]:
    """Describe the process as run metadata: command, environment, packages, machine, time."""
    command = sys.argv or [""]
    return {
        "command": redact_command([os.path.basename(command[0]), *command[1:]]),
        "environment": environment(os.environ),
        "packages": dict(_versions(PACKAGES)),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "started": now(),
    }


def now() -> str:
    """The time, in UTC, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def jsonable(value: Any) -> Any:
    """Convert a configuration to JSON values: texts redacted, anything that JSON lacks as text."""
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            str(key): HIDDEN
            if isinstance(item, str) and item and _is_secret_key(str(key))
            else jsonable(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    return redact(str(value))


def _is_secret_name(name: str) -> bool:
    words = [
        word for word in re.split(r"[-_.\s]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()) if word
    ]
    return bool(_SECRET_WORDS.intersection(words)) or not _SECRET_PAIRS.isdisjoint(pairwise(words))


def _is_secret_key(name: str) -> bool:
    """As `_is_secret_name`, for a configuration, in which an `image_token` is no secret."""
    may_be_secret = not name.lower().endswith("_token") or name.lower() in _TOKEN_KEYS
    return may_be_secret and _is_secret_name(name)


@cache
def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    import importlib.metadata  # brings email and zipfile, and only a capture needs it

    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
    return versions
