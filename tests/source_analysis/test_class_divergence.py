"""Code that the device runs and a CPU does not, in small sources of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorcap.source_analysis import SourceDivergence, divergence
from tensorcap_formats.errors import ReadError, UsageError


def look(tmp_path: Path, code: str) -> SourceDivergence:
    (tmp_path / "port.py").write_text(code)
    return divergence([tmp_path / "port.py"])


def classes(tmp_path: Path, code: str) -> list[tuple[str, str, str, str]]:
    """Of each pair of classes what depends on it, the switch, and the two classes."""
    return [(each.component, each.switch, each.here, each.there) for each in look(tmp_path, code).classes]


NORMS = ("norm", "cpu", "TorchNorm", "KernelNorm")
FACTORY = "def get_norm_cls(size=None, offset=False):\n"


@pytest.mark.spec("NRN-50")
@pytest.mark.parametrize(
    "body",
    [
        pytest.param("    return TorchNorm if cpu_mode() else KernelNorm\n", id="conditional-expression"),
        pytest.param("    return KernelNorm if not cpu_mode() else TorchNorm\n", id="negated"),
        pytest.param("    return TorchNorm(size) if cpu_mode() else KernelNorm(size)\n", id="instances"),
        pytest.param("    return TorchNorm if (cpu_mode() and offset) else KernelNorm\n", id="and-another"),
        pytest.param("    return KernelNorm if offset and not cpu_mode() else TorchNorm\n", id="and-negated"),
        pytest.param("    if cpu_mode():\n        return TorchNorm\n    return KernelNorm\n", id="guard"),
        pytest.param(
            "    if cpu_mode():\n        return TorchNorm\n    else:\n        return KernelNorm\n", id="else"
        ),
        pytest.param(
            "    if size:\n        return\n"
            "    elif on_cpu:\n        return TorchNorm\n    return KernelNorm\n",
            id="elif",
        ),
        pytest.param(
            "    is_plain = cpu_mode()\n    return TorchNorm if is_plain else KernelNorm\n", id="alias"
        ),
        pytest.param(
            '    if os.environ.get("NXD_CPU_MODE", "0") == "1":\n        return TorchNorm\n'
            "    return KernelNorm\n",
            id="environment",
        ),
        pytest.param(
            '    if int(os.environ["NXD_CPU_MODE"]):\n        return TorchNorm\n    return KernelNorm\n',
            id="environment-item",
        ),
        pytest.param(
            '    if size.device.type == "cpu":\n        return TorchNorm\n    return KernelNorm\n',
            id="device-type",
        ),
        pytest.param('    return KernelNorm if size.device.type == "xla" else TorchNorm\n', id="xla"),
        pytest.param("    return KernelNorm if size.is_cuda else TorchNorm\n", id="is-cuda"),
        pytest.param(
            '    return TorchNorm if getattr(size, "on_cpu", False) else KernelNorm\n', id="getattr"
        ),
        pytest.param(
            "    on_cpu = bool(on_cpu)\n    return TorchNorm if on_cpu else KernelNorm\n",
            id="alias-of-itself",
        ),
        pytest.param(
            "    a = on_cpu or b\n    b = on_cpu or a\n    return TorchNorm if b else KernelNorm\n",
            id="aliases-in-a-circle",
        ),
        pytest.param("    return partial(TorchNorm if cpu_mode() else KernelNorm, eps=1e-6)\n", id="partial"),
        pytest.param("    return custom.TorchNorm if cpu_mode() else ops.KernelNorm\n", id="dotted"),
    ],
)
def test_a_function_gives_another_class_on_the_device(tmp_path: Path, body: str) -> None:
    assert classes(tmp_path, FACTORY + body) == [NORMS]


@pytest.mark.spec("NRN-50")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        pytest.param(
            "class Layer:\n    def __init__(self, c):\n"
            "        self.norm = TorchNorm(c) if c.on_cpu else KernelNorm(c)\n",
            [NORMS],
            id="attribute",
        ),
        pytest.param(
            "class Layer:\n    def __init__(self, c):\n        if c.on_cpu:\n"
            "            self.norm, self.n = TorchNorm(c), 1\n            self.norm = TorchNorm(c)\n"
            "            self.act = Act()\n        else:\n            self.norm = KernelNorm(c)\n"
            "            self.act = Act()\n",
            [NORMS],
            id="block-of-several",
        ),
        pytest.param(
            "class Layer:\n    def __init__(self, c):\n        self.norm = KernelNorm(c)\n"
            "        if c.on_cpu:\n            self.norm = TorchNorm(c)\n",
            [NORMS],
            id="set-before",
        ),
        pytest.param(
            "class Layer:\n    def __init__(self, c):\n        self.sampler = None\n"
            "        if not c.on_cpu:\n            self.sampler = Sampler(c)\n",
            [("sampler", "cpu", "None", "Sampler")],
            id="nothing-on-a-cpu",
        ),
        pytest.param(
            "class Layer:\n    def __init__(self, c):\n        self.on_cpu = c.on_cpu\n"
            "    def build(self):\n        return Plain() if self.on_cpu else Fast()\n",
            [("build", "cpu", "Plain", "Fast")],
            id="attribute-that-is-the-switch",
        ),
        pytest.param(
            "def runs_on_host():\n    return cpu_mode()\n"
            "def make_norm():\n    return TorchNorm() if runs_on_host() else KernelNorm()\n",
            [NORMS],
            id="function-that-is-the-switch",
        ),
        pytest.param(
            "if cpu_mode():\n    from a import TorchNorm as Norm\n"
            "else:\n    from b import KernelNorm as Norm\n",
            [("Norm", "cpu", "TorchNorm", "KernelNorm")],
            id="imports",
        ),
        pytest.param(
            "class Norm(TorchNorm if cpu_mode() else KernelNorm):\n    pass\n",
            [("Norm", "cpu", "TorchNorm", "KernelNorm")],
            id="base-class",
        ),
        pytest.param(
            "class Layer:\n    def __init__(self, c):\n"
            "        self.layers = ModuleList([TorchNorm(c) if cpu_mode() else KernelNorm(c) for _ in c])\n",
            [("layers", "cpu", "TorchNorm", "KernelNorm")],
            id="within-a-list",
        ),
        pytest.param(
            "class Layer:\n    def __init__(self, c):\n        if cpu_mode():\n"
            "            self.seq = Sequential(TorchNorm(), Act())\n        else:\n"
            "            self.seq = Sequential(KernelNorm(), Act())\n",
            [("seq", "cpu", "TorchNorm", "KernelNorm")],
            id="part-of-the-same-class",
        ),
        pytest.param(
            "def get_norm_cls():\n"
            "    return KernelNorm if get_tensor_model_parallel_size() > 1 else TorchNorm\n",
            [("norm", "tp-size", "TorchNorm", "KernelNorm")],
            id="ranks",
        ),
        pytest.param(
            "def get_norm_cls(c):\n"
            "    if c.tp_degree == 1:\n        return TorchNorm\n    return KernelNorm\n",
            [("norm", "tp-size", "TorchNorm", "KernelNorm")],
            id="one-rank",
        ),
        pytest.param(
            "def get_norm_cls():\n    return TorchNorm if dist.get_world_size() == 1 else KernelNorm\n",
            [("norm", "tp-size", "TorchNorm", "KernelNorm")],
            id="processes",
        ),
        pytest.param(
            "def get_norm_cls():\n    tp = state.get_tensor_model_parallel_size()\n"
            "    return KernelNorm if tp > 1 else TorchNorm\n",
            [("norm", "tp-size", "TorchNorm", "KernelNorm")],
            id="ranks-in-a-variable",
        ),
        pytest.param(
            "class Layer:\n    def __init__(self, c):\n        if c.mlp_kernel_enabled:\n"
            "            self.mlp = FastMLP(c)\n        else:\n            self.mlp = PlainMLP(c)\n",
            [("mlp", "kernel", "PlainMLP", "FastMLP")],
            id="kernel-flag",
        ),
    ],
)
def test_other_forms_give_another_class_too(
    tmp_path: Path, code: str, expected: list[tuple[str, str, str, str]]
) -> None:
    assert classes(tmp_path, code) == expected


@pytest.mark.spec("NRN-50")
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            "def get_norm_cls():\n    # on CPU -> HFNorm\n    return KernelNorm\n", id="name-in-a-comment"
        ),
        pytest.param(
            "def get_norm_cls():\n    return KernelNorm\n\nclass Layer:\n    def forward(self, x):\n"
            "        return Outputs(x) if self.training else x\n",
            id="later-method",
        ),
        pytest.param(
            "def to_cpu(c):\n    if c.on_cpu:\n        raise NotImplementedError('no bfloat16')\n"
            "    return Model(c)\n",
            id="refusal",
        ),
        pytest.param(
            "def kind(x):\n    return x.device.type if x.device.type != 'mps' else 'cpu'\n", id="other-device"
        ),
        pytest.param("def act(c):\n    return Act.SiLU if c.on_cpu else Act.GELU\n", id="members-of-a-class"),
        pytest.param("def norm(c):\n    return Norm(1) if cpu_mode() else Norm(2)\n", id="one-class"),
        pytest.param("def norm(c):\n    return NormA if c.size > 1 else NormB\n", id="another-size"),
        pytest.param("def norm(c):\n    return NormA if c.kernel_size else NormB\n", id="size-of-a-kernel"),
        pytest.param(
            "def norm(c):\n    return NormA if c.tp_degree > c.heads else NormB\n", id="unknown-size"
        ),
        pytest.param("def norm(c):\n    return NormA if c.tp_degree >= 1 else NormB\n", id="always"),
        pytest.param("def f(x):\n    return MAX_A if cpu_mode() else MAX_B\n", id="constants"),
    ],
)
def test_no_class_is_invented(tmp_path: Path, code: str) -> None:
    assert classes(tmp_path, code) == []


@pytest.mark.spec("NRN-51")
def test_other_code_on_the_device_is_listed_as_such(tmp_path: Path) -> None:
    code = (
        "class Attention:\n    def __init__(self, c):\n"
        "        if cpu_mode():\n            self.heads = c.heads\n"
        "        else:\n            self.heads = c.heads // c.tp\n"
    )
    result = look(tmp_path, code)
    assert result.classes == []
    (path,) = result.paths
    assert (path.line, path.scope) == (3, "Attention.__init__")
    assert (path.here, path.there) == ("self.heads = c.heads", "self.heads = c.heads // c.tp")
    assert "on a CPU does not run" in path.dual_test
    assert result.exit_status == 1


@pytest.mark.spec("NRN-51")
@pytest.mark.parametrize(
    ("body", "paths"),
    [
        pytest.param("if c.on_cpu:\n        log.info('slow')\n    else:\n        pass\n", 0, id="log"),
        pytest.param("if c.on_cpu:\n        raise ValueError\n", 0, id="refusal"),
        pytest.param("if not c.on_cpu:\n        c = c.int()\n", 1, id="one-way-alone"),
        pytest.param("c = argmax(c) if c.on_cpu else nxd_argmax(c)\n", 1, id="expression"),
    ],
)
def test_a_way_that_only_refuses_or_logs_is_none(tmp_path: Path, body: str, paths: int) -> None:
    assert len(look(tmp_path, f"def f(c):\n    {body}    return c\n").paths) == paths


@pytest.mark.spec("NRN-52")
def test_kernels_are_listed_with_their_users(tmp_path: Path) -> None:
    code = (
        "from nkilib.core.mlp.mlp import mlp\nimport torch_neuronx\ntry:\n"
        "    from flash_attn import flash_attn_func\nexcept ImportError:\n    flash_attn_func = None\n"
        "class MLP:\n    def forward(self, x):\n        if self.mlp_kernel_enabled and self.training:\n"
        "            return mlp(x)\n        return self.up(x)\n    def other(self, kernel_size):\n"
        "        return 1 if kernel_size else 2\n"
    )
    result = look(tmp_path, code)
    (flag,) = result.kernel_flags
    assert (flag.name, flag.lines, flag.functions) == ("mlp_kernel_enabled", (9,), ("MLP.forward",))
    assert "calls no submodule" in flag.dual_test
    mlp, flash = result.kernel_imports
    assert (mlp.module, mlp.names, mlp.users, mlp.is_optional) == (
        "nkilib.core.mlp.mlp",
        ("mlp",),
        ("MLP.forward",),
        False,
    )
    assert (flash.module, flash.is_optional) == ("flash_attn", True)
    assert "once with the package and once without" in flash.dual_test


@pytest.mark.spec("NRN-53")
def test_entries_are_those_of_the_equivalence_method(tmp_path: Path) -> None:
    result = look(tmp_path, FACTORY + "    return TorchNorm if cpu_mode() else KernelNorm\n")
    (file,) = result.to_json()["files"]
    assert (file["file"], file["divergence_count"]) == (str(tmp_path / "port.py"), 1)
    (entry,) = file["divergences"]
    assert {name: entry[name] for name in ("component", "cpu_class", "device_class", "factory_function")} == {
        "component": "norm",
        "cpu_class": "TorchNorm",
        "device_class": "KernelNorm",
        "factory_function": "get_norm_cls",
    }
    assert entry["source_location"] == f"{tmp_path / 'port.py'}:2"
    assert entry["pattern"] == "cpu: cpu_mode()"
    assert "never KernelNorm" in entry["recommendation"]


@pytest.mark.spec("NRN-53")
def test_the_code_of_two_classes_is_compared_if_both_are_there(tmp_path: Path) -> None:
    code = (
        "class TorchNorm:\n    def forward(self, x):\n        return x.float().mean(-1)\n"
        "class KernelNorm:\n    def forward(self, x):\n        return kernel(x).sqrt()\n"
        + FACTORY
        + "    return TorchNorm if cpu_mode() else KernelNorm\n"
    )
    (pair,) = look(tmp_path, code).between
    assert (pair.reference, pair.target) == ("TorchNorm", "KernelNorm")
    assert (set(pair.lost_operations), set(pair.new_operations)) == ({"mean"}, {"sqrt"})
    assert (set(pair.lost_casts), set(pair.new_casts)) == ({"float32"}, set())


@pytest.mark.spec("NRN-53")
def test_sources_are_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    result = look(tmp_path, f"open({str(mark)!r}, 'w')\nimport no_such_package\n")
    assert result.exit_status == 0
    assert not mark.exists()


@pytest.mark.spec("NRN-53")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("a.py", b"def f(:\n", r"a\.py:1: is no Python that can be parsed", id="syntax"),
        pytest.param("a.py", b"x = 1\x00\n", r"a\.py.*: is no Python that can be parsed", id="null-byte"),
        pytest.param("a.py", b"x = " + b"1 + " * 2000 + b"1\n", r"a\.py: is no Python", id="nested"),
        pytest.param(None, b"", "cannot be read: No such file", id="missing"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(
    tmp_path: Path, name: str | None, content: bytes, message: str
) -> None:
    path = tmp_path / "a.py"
    if name:
        path.write_bytes(content)
    with pytest.raises(ReadError, match=message):
        divergence([path])


@pytest.mark.spec("NRN-53")
def test_a_folder_without_sources_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no \.py file"):
        divergence([tmp_path])
