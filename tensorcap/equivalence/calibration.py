"""Limits from ports that pass: quantiles of R and of KL, with a margin; and which limits are constant.

Ports that fail are left out, and the port under test is refused: a limit that it sets for itself it cannot
miss.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.forced_decoding import TAU_R
from tensorcap.equivalence.models import Side
from tensorcap.equivalence.parameters import Limits
from tensorcap.wording import counted
from tensorcap_formats.errors import ReadError, UsageError, abbreviate

CONFIG: Final = "equiv_config.json"
STAGE2: Final = "results/stage2.json"
FORCED: Final = "results/teacher_forced.json"
R_QUANTILE: Final = 0.99
KL_QUANTILE: Final = 0.95
KL_MAX_QUANTILE: Final = 0.99
SAFETY_MARGIN: Final = 1.1
FEWEST_PORTS: Final = 2  # of one, a limit says no more than that port itself
FEWEST_SAMPLES: Final = 20  # a quantile of fewer is no more than their maximum
_METHOD: Final = Limits()
CONSTANT: Final[Mapping[str, float]] = {  # what no run says anything of, as the method sets it
    "theta_cosine": _METHOD.theta_cosine,
    "rho_tail": _METHOD.rho_tail,
    "token_match": _METHOD.token_match,
}


@dataclass(frozen=True, slots=True)
class LimitsOfPorts:
    """Limits that ports which pass stay within.

    Attributes:
        tau_r: Of R of components; None if too few have one, so that the method's stays.
        tau_r_of_type: The same by the last part of a component's name.
        delta_kl: Of the 95th percentile of KL, nats; None if there are too few positions.
        delta_kl_max: Of the largest KL of a prompt, nats; likewise.
        ports: The folders that count.
        left_out: Folders that do not, with the reason.
        samples: Count of values of R, and of KL.
    """

    tau_r: float | None
    tau_r_of_type: Mapping[str, float]
    delta_kl: float | None
    delta_kl_max: float | None
    ports: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    samples: tuple[int, int]

    @property
    def settings(self) -> dict[str, float]:
        """The limits that change, as members of `[limits]` in `equivalence.toml`."""
        named = {"tau_r": self.tau_r, "delta_kl": self.delta_kl, "delta_kl_max": self.delta_kl_max}
        return {f"limits.{name}": value for name, value in named.items() if value is not None}

    @property
    def words(self) -> tuple[str, ...]:
        """The result as sentences."""
        components, positions = self.samples
        words = [f"Limits of {counted(len(self.ports), 'port')} that pass: {', '.join(self.ports)}."]
        if self.tau_r is None:
            words.append(f"tau_r stays {TAU_R:g}: {counted(components, 'component')} with R are too few.")
        else:
            words.append(f"tau_r {self.tau_r:.4g}, of R of {counted(components, 'component')}.")
        if self.delta_kl is None or self.delta_kl_max is None:
            words.append(f"KL decides nothing: {counted(positions, 'position')} are too few.")
        else:
            words.append(
                f"delta_kl {self.delta_kl:.3g} and delta_kl_max {self.delta_kl_max:.3g} nats, of "
                f"{counted(positions, 'position')}."
            )
        listed = ", ".join(f"{name} {value:g}" for name, value in CONSTANT.items())
        words.append(f"Constant, whatever the ports are: {listed}.")
        words += [f"Left out: {folder}: {reason}." for folder, reason in self.left_out]
        return tuple(words)

    def to_json(self) -> dict[str, Any]:
        """The content of `equiv_config.json`, in the method's members and further ones."""
        return {
            "tau_r": TAU_R if self.tau_r is None else self.tau_r,
            "tau_r_per_type": dict(self.tau_r_of_type),
            "delta_kl": self.delta_kl,
            "delta_kl_max": self.delta_kl_max,
            **CONSTANT,
            "calibration": {
                "ports": list(self.ports),
                "left_out": [{"folder": folder, "reason": reason} for folder, reason in self.left_out],
                "num_r": self.samples[0],
                "num_kl": self.samples[1],
                "r_quantile": R_QUANTILE,
                "kl_quantile": KL_QUANTILE,
                "kl_max_quantile": KL_MAX_QUANTILE,
                "safety_margin": SAFETY_MARGIN,
                "constant": list(CONSTANT),
            },
        }


@dataclass(frozen=True, slots=True)
class KlLimits:
    """The limits of KL that a calibration set; None for one that decides nothing."""

    delta_kl: float | None
    delta_kl_max: float | None


@dataclass(frozen=True, slots=True)
class _Samples:
    """What a port that passes gives.

    Attributes:
        ratios: R by component.
        kl: Of each prompt, KL of each position, nats.
    """

    ratios: tuple[tuple[str, float], ...]
    kl: tuple[tuple[float, ...], ...]


def calibrate(folders: Sequence[str | Path], *, under_test: str | Path) -> LimitsOfPorts:
    """Find the limits that ports which pass stay within.

    `tau_r` is the larger of 1.2 and the 0.99 quantile of R of all components; of a kind of component the
    quantile is multiplied by 1.1. `delta_kl` is the 0.95 quantile of KL of all positions times 1.1,
    `delta_kl_max` the 0.99 quantile of the largest KL of each prompt times 1.1. Quantiles are the next larger
    value that occurs.

    Args:
        folders: Experiments of ports that are known to be good, with their stages run.
        under_test: The experiment that the limits are for; none of them may be of its port.

    Raises:
        UsageError: One is of the port under test, two are of one port, or too few pass.
        ReadError: One is no experiment.
    """
    tested = Experiment.open(under_test)
    known = {_identity(tested): f"the port under test, {under_test}"}
    samples, ports, left_out = [], [], []
    for folder in map(Path, folders):
        experiment = Experiment.open(folder)
        if folder.resolve() == Path(under_test).resolve():
            raise UsageError(f"{folder}: is the experiment under test, which sets no limits for itself")
        identity = _identity(experiment)
        if identity in known:
            raise UsageError(f"{folder}: has the port of {known[identity]}, expected another one")
        known[identity] = str(folder)
        one, reason = _read_port(folder)
        if one is None:
            left_out.append((str(folder), reason))
        else:
            samples.append(one)
            ports.append(str(folder))
    if len(ports) < FEWEST_PORTS:
        reasons = "".join(f"; {folder}: {reason}" for folder, reason in left_out)
        raise UsageError(f"ports that pass: {len(ports)}, expected at least {FEWEST_PORTS}{reasons}")
    return _limits(samples, tuple(ports), tuple(left_out))


def read_config(path: Path) -> KlLimits | None:
    """Read the limits of KL of an `equiv_config.json`; None if there is none.

    Raises:
        ReadError: It cannot be read, or is no JSON.
        UsageError: It is no calibration, or a limit no number.
    """
    if not path.exists():
        return None
    content = _read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("calibration"), dict):
        raise UsageError(f"{path}: is no calibration, as `tcap equivalence calibrate` writes it")
    values = []
    for name in ("delta_kl", "delta_kl_max"):
        value = content.get(name)
        if value is not None and not _is_number(value):
            raise UsageError(
                f"{path}: {name}: found {abbreviate(repr(value))}, expected a number of at least 0"
            )
        values.append(value)
    return KlLimits(*values)


def _limits(
    samples: Sequence[_Samples], ports: tuple[str, ...], left_out: tuple[tuple[str, str], ...]
) -> LimitsOfPorts:
    ratios = [ratio for one in samples for _, ratio in one.ratios]
    by_type: dict[str, list[float]] = {}
    for one in samples:
        for name, ratio in one.ratios:
            by_type.setdefault(_type_of(name), []).append(ratio)
    prompts = [prompt for one in samples for prompt in one.kl]
    kl = [value for prompt in prompts for value in prompt]
    has_kl = len(kl) >= FEWEST_SAMPLES
    largest = [max(prompt) for prompt in prompts if prompt]
    return LimitsOfPorts(
        max(TAU_R, _quantile(ratios, R_QUANTILE)) if len(ratios) >= FEWEST_SAMPLES else None,
        {
            name: max(TAU_R, SAFETY_MARGIN * _quantile(values, R_QUANTILE))
            for name, values in sorted(by_type.items())
        },
        SAFETY_MARGIN * _quantile(kl, KL_QUANTILE) if has_kl else None,
        SAFETY_MARGIN * _quantile(largest, KL_MAX_QUANTILE) if has_kl else None,
        ports,
        left_out,
        (len(ratios), len(kl)),
    )


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share, method="higher"))


def _identity(experiment: Experiment) -> tuple[str, ...]:
    """What a port is: what makes it, in files of this content, in a precision, on so many ranks."""
    side, settings = Side(experiment, "target", is_patched=True), experiment.settings
    files = tuple(experiment.digest(path) for path in side.files)
    name = settings.parameters.target_causal_class or side.recipe.path
    return (*files, name, settings.run.dtype, str(settings.run.tp))


def _read_port(folder: Path) -> tuple[_Samples | None, str]:
    """What a port gives, or None and why it does not count."""
    components, forced = folder / STAGE2, folder / FORCED
    missing = [path.name for path in (components, forced) if not path.exists()]
    if missing:
        return None, f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there yet"
    content, decoded = _read_json(components), _read_json(forced)
    try:
        failed = [one["component"] for one in content["results"] if not one["passed"]]
        ratios = tuple(
            (str(one["component"]), float(one["r_ratio"]))
            for one in content["results"]
            if _is_number(one.get("r_ratio"))
        )
        kl = tuple(tuple(prompt["per_position_kl"]) for prompt in decoded["per_prompt"])
        has_passed = decoded.get("passed")
    except (KeyError, TypeError, AttributeError) as error:
        raise ReadError(f"{folder}: a file of its stages lacks {error}") from error
    if failed:
        return None, f"{counted(len(failed), 'component')} failed, first {failed[0]}"
    if has_passed is not True or not all(_is_number(value) for prompt in kl for value in prompt):
        return None, "its gates of stages 5 and 6 are not all passed"
    return _Samples(ratios, kl), ""


def _type_of(component: str) -> str:
    """The last part of a component's name that is no number.

    Example:
        >>> _type_of("model.layers.0.mlp.down_proj"), _type_of("layers.1")
        ('down_proj', 'layers')
    """
    parts = [part for part in re.split(r"[.\s]+", component) if part and not part.isdigit()]
    return parts[-1] if parts else component


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return 0 <= value <= sys.float_info.max


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ReadError(f"{path}: is no JSON: {error}") from error
