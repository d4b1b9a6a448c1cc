from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorcap
from tensorcap.workload import HIDDEN, environment, jsonable, redact, redact_command

HF = "hf_" + "a1B2" * 8  # put together here, so that no scanner takes this file for a leak
OPENAI = "sk-" + "proj-" + "a1B2" * 8
GITHUB = "ghp_" + "a1B2" * 9
AWS = "AKIA" + "ABCDEFGH12345678"
JWT = ".".join(["eyJhbGciOiJIUzI1NiJ9", "eyJzdWIiOiIxMjM0NTY3ODkwIn0", "c2lnbmF0dXJlc2lnbmF0dXJl"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(f"login {HF} now", f"login {HIDDEN} now", id="hugging-face"),
        pytest.param(OPENAI, HIDDEN, id="openai"),
        pytest.param(GITHUB, HIDDEN, id="github"),
        pytest.param("github_pat_" + "a1B2" * 8, HIDDEN, id="github-fine-grained"),
        pytest.param(AWS, HIDDEN, id="aws"),
        pytest.param(JWT, HIDDEN, id="json-web-token"),
        pytest.param("https://me:pw@example.org/x", f"https://{HIDDEN}@example.org/x", id="url-password"),
        pytest.param("s3://b/k?X-Amz-Signature=abc&y=1", f"s3://b/k?{HIDDEN}&y=1", id="signed-url"),
        pytest.param("Authorization: Bearer abcdefgh.ijkl", f"Authorization: Bearer {HIDDEN}", id="bearer"),
        pytest.param(
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", HIDDEN, id="private-key"
        ),
        pytest.param("hf_model task-1 risk-free", "hf_model task-1 risk-free", id="no-secret"),
        pytest.param(
            "https://example.org:8080/a@b", "https://example.org:8080/a@b", id="port-is-no-password"
        ),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param(["--token", "abc"], ["--token", HIDDEN], id="token"),
        pytest.param(["--hf-token=abc"], [f"--hf-token={HIDDEN}"], id="joined"),
        pytest.param(["--api_key", "-abc"], ["--api_key", HIDDEN], id="value-with-a-dash"),
        pytest.param(["--password", "--json"], ["--password", "--json"], id="option-without-value"),
        pytest.param(["--config", "auth.secret=abc"], ["--config", f"auth.secret={HIDDEN}"], id="key-value"),
        pytest.param(["HF_TOKEN=abc", "x"], [f"HF_TOKEN={HIDDEN}", "x"], id="environment-style"),
        pytest.param(["--max-new-tokens", "4"], ["--max-new-tokens", "4"], id="tokens-are-no-token"),
        pytest.param(["--prompt", f"say {HF}"], ["--prompt", f"say {HIDDEN}"], id="inside-a-prompt"),
    ],
)
def test_secrets_of_a_command_line_are_hidden(command: list[str], expected: list[str]) -> None:
    assert redact_command(["tcap", *command]) == ["tcap", *expected]


def test_the_home_folder_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert redact("/home/somebody/m.py /home/somebody2") == "~/m.py /home/somebody2"


def test_the_environment_is_taken_by_an_allow_list() -> None:
    variables = {"HF_TOKEN": HF, "PATH": "/bin", "USER": "me", "OMP_NUM_THREADS": "2"}
    assert environment(variables) == {"OMP_NUM_THREADS": "2"}


def test_a_configuration_has_a_json_form_without_secrets() -> None:
    config = {
        "dtype": torch.bfloat16,
        "limit": float("inf"),
        "api_key": "abc",
        "image_token": "<image>",
        "layers": ({1: None},),
    }
    assert jsonable(config) == {
        "dtype": "torch.bfloat16",
        "limit": "inf",
        "api_key": HIDDEN,
        "image_token": "<image>",
        "layers": [{"1": None}],
    }


class Failing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> None:
        raise ValueError(f"went wrong with {HF}")


@pytest.mark.spec("ARC-72")
def test_no_secret_reaches_the_archive(path: Path, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [HF, OPENAI, GITHUB, AWS, "plain-words"]
    monkeypatch.setenv("HF_TOKEN", HF)
    monkeypatch.setenv("OPENAI_API_KEY", OPENAI)
    monkeypatch.setenv("XLA_FLAGS", f"--x={GITHUB}")
    monkeypatch.setattr("sys.argv", ["run.py", "--password", "plain-words", f"--note={AWS}"])
    small.config = type("Config", (), {"to_dict": lambda self: {"auth_token": HF, "note": f"by {GITHUB}"}})()
    small.append(Failing())
    with pytest.raises(ValueError, match="went wrong"), tensorcap.capture(small, path):
        small(torch.ones(1, 4))
    raw = path.read_bytes()
    assert [secret for secret in secrets if secret.encode() in raw] == []
    with tensorcap.open_archive(path) as archive:
        assert archive.run["command"] == ["run.py", "--password", HIDDEN, f"--note={HIDDEN}"]
        assert archive.run["environment"]["XLA_FLAGS"] == f"--x={HIDDEN}"
        assert archive.run["model"]["config"] == {"auth_token": HIDDEN, "note": f"by {HIDDEN}"}
        text = json.dumps(archive.run)
    for word in (os.uname().nodename, "hostname", "username"):
        assert f'"{word}"' not in text


@pytest.mark.spec("ARC-70")
def test_the_run_says_what_was_run_on_what(path: Path, small: Any) -> None:
    with tensorcap.capture(small, path, run={"ticket": 7}), torch.no_grad():
        small(torch.ones(1, 4))
    with tensorcap.open_archive(path) as archive:
        run = archive.run
    assert run["framework"]["name"] == "torch"
    assert run["framework"]["version"] == torch.__version__
    assert run["model"]["class"] == "torch.nn.modules.container.Sequential"
    assert run["model"]["file"].endswith("container.py")
    assert (run["dtype"], run["compute_dtype"], run["device"], run["seed"]) == (
        "float32",
        "float32",
        "cpu",
        0,
    )
    assert run["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (run["steps"], run["ticket"]) == (1, 7)
    assert run["finished"] >= run["started"]
    assert [(m["path"], m["class"].rpartition(".")[2], m["training"]) for m in run["modules"]] == [
        ("", "Sequential", False),
        ("0", "Linear", False),
        ("1", "ReLU", False),
        ("2", "Linear", False),
    ]
    parameters = run["modules"][3]["parameters"]
    assert {name: (entry["shape"], entry["dtype"]) for name, entry in parameters.items()} == {
        "weight": ([2, 4], "float32"),
        "bias": ([2], "float32"),
    }
    source = run["sources"]["torch.nn.modules.activation.ReLU"]
    assert source["text"].startswith("class ReLU(Module):")
    assert sorted(run["sources"]) == [
        "torch.nn.modules.activation.ReLU",
        "torch.nn.modules.container.Sequential",
        "torch.nn.modules.linear.Linear",
    ]


def test_the_compute_dtype_is_that_of_autocast(path: Path, small: Any) -> None:
    with (
        tensorcap.capture(small, path),
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        small(torch.ones(1, 4))
    with tensorcap.open_archive(path) as archive:
        assert archive.run["dtype"] == "float32"
        assert archive.run["compute_dtype"] == "bfloat16"
        assert archive.get("0/0/output").dtype.name == "bfloat16"
