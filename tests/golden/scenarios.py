"""What golden results are made of: batches of command lines, each with the workloads and inputs it needs.

Batches may import the modules of `tests` and `examples` of the tree under test, which move with its code;
all such imports stand here. Of a command, a leading `&` asks for its `--json` too, `!` for a process of its
own.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Batch:
    """Commands that are run in one process and one folder.

    Attributes:
        commands: One a line, without `tcap`; lines that begin with `#` are comments.
        workloads: Python source of `workloads.py`, which the commands name functions of.
        prepare: Python source that is run before, to write input files.
        torch: Whether torch is needed.
    """

    commands: str
    workloads: str = ""
    prepare: str = ""
    torch: bool = True

    def as_json(self, *, has_old_names: bool = False) -> dict[str, Any]:
        """The batch for `tests.golden.record`.

        Args:
            has_old_names: Whether the tree under test has the names of `OLD_NAMES`.
        """
        steps = list(_steps(self.commands))
        for step in steps:
            step["invoked"] = old_names(step["arguments"]) if has_old_names else step["arguments"]
        return {"workloads": self.workloads, "prepare": self.prepare, "torch": self.torch, "steps": steps}


# Names of commands and options before they had one meaning each, by command: for trees that are older.
OLD_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "bisect": {"--target-model": "--into"},
    "capture": {"--only": "--include", "--print-only": "--filter"},
    "compare": {"--layout": "--steps", "--reference-repeat": "--repeat"},
    "equivalence": {"equivalence": "localize", "archives": "", "localize": ""},
    "export": {"--format": "--layout"},
    "inject": {"--target-model": "--into", "--inject-inputs": "--inputs", "--inject-outputs": "--outputs"},
    "localize": {
        "--target-model": "--into",
        "--reference-model": "--reference",
        "--target-repeat": "--repeat",
    },
    "preflight": {"--reference-repeat": "--repeat"},
    "replay": {"--target-model": "--target", "--reference-model": "--reference"},
}


def old_names(arguments: Sequence[str]) -> list[str]:
    """A command as trees with the old names take it."""
    names = OLD_NAMES.get(arguments[0], {})
    return [new for argument in arguments if (new := names.get(argument, argument))]


def _steps(commands: str) -> Iterator[dict[str, Any]]:
    for line in commands.splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        mark = text[0] if text[0] in "&!" else ""
        arguments = shlex.split(text.removeprefix(mark))
        yield {"arguments": arguments, "alone": mark == "!"}
        if mark == "&":
            yield {"arguments": [*arguments, "--json"], "alone": False}


_COMMANDS: Final = (
    "align bisect calibrate capture check compare convert diagnose equivalence export import inject localize "
    "ls preflight recover replay show tree verify"
)
_HELP: Final = Batch(
    "\n".join(
        ["--help", "--version", *(f"{name} --help" for name in _COMMANDS.split())]
        + [f"capture {name} --help" for name in ("torch", "script", "max")]
    )
    + """
    nonsense
    compare
    compare no.h5 no2.h5
    compare --from no.json
    ls no.h5
    align no.h5 no2.h5
    verify no.h5 no2.h5 -o report
    capture torch no.py:nothing -o x.h5
    """,
    torch=False,
)

_EXAMPLES: Final = """
import sys
sys.path.insert(0, "{tree}/examples")
import torch
import models
import rewritten
import tensorcap
reference, port = models.reference, models.port
other, wrong = rewritten.port, rewritten.wrong

def padded():
    workload = models.reference()
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, :5] = 0
    return tensorcap.Workload(workload.model, {**workload.inputs, "attention_mask": mask})

def padded_port():
    workload = padded()
    workload.model.model.layers[1].self_attn.scaling = 0.3
    return workload

def shifted():
    workload = models.reference()
    workload.model.model.layers[3].input_layernorm.variance_epsilon = 1e-1
    return workload

def layered(num_hidden_layers=4):
    workload = models.port()
    del workload.model.model.layers[num_hidden_layers:]
    return workload

def layered_reference(num_hidden_layers=4):
    workload = models.reference()
    del workload.model.model.layers[num_hidden_layers:]
    return workload

def scaled():
    workload = rewritten.port()
    with torch.no_grad():
        next(iter(workload.model.parameters())).mul_(1.25)
    return workload

llama = tensorcap.Port(models.reference, models.port)
"""

_JUDGE: Final = """
capture torch workloads.py:reference -o ref.h5
capture torch workloads.py:reference -o again.h5
capture torch workloads.py:port -o port.h5
capture torch workloads.py:shifted -o shifted.h5
capture torch --like ref.h5 --dtype bfloat16 -o bf16.h5
capture torch --like port.h5 --dtype bfloat16 -o port16.h5
capture torch workloads.py:other -o other.h5
capture torch workloads.py:wrong -o wrong.h5
capture torch workloads.py:padded -o padded.h5
capture torch workloads.py:padded_port -o padded_port.h5
capture torch --like ref.h5 --perturb bfloat16 -o perturbed.h5 --json
& compare ref.h5 again.h5
& compare ref.h5 port.h5
& compare ref.h5 bf16.h5
& compare ref.h5 port16.h5
& compare ref.h5 port16.h5 --baseline bf16.h5
& compare ref.h5 bf16.h5 --reference-repeat again.h5
& compare ref.h5 shifted.h5
& compare ref.h5 perturbed.h5 --compute-dtype bfloat16
compare ref.h5 port.h5 --all --where
compare ref.h5 port.h5 --by-module --sort error
compare ref.h5 bf16.h5 --by-module --where
& compare ref.h5 port.h5 --rtol 1e-3
& compare ref.h5 bf16.h5 --rtol 0.01 --atol 0.001
& compare ref.h5 bf16.h5 --thresholds thresholds.toml
& compare ref.h5 port.h5 --metric kl --metric overlap --metric max_abs
compare ref.h5 port.h5 --metric nothing
& compare ref.h5 port.h5 --only '0/model.layers.2*/output*' --exclude '*.self_attn*'
& compare ref.h5 port.h5 --only '0/nothing/output'
& compare ref.h5::0/@root/output.logits port.h5::0/@root/output.logits --atol 0.1
compare ref.h5::0/model.norm/output port.h5::0/model.norm/output --layout 'squeeze(0)'
& compare one.npz::x two.npz::x --layout 'squeeze(0)' --atol 1e-5
& compare one.npz two.npz
& compare one.npz::y two.npz::x --layout 'squeeze(0)'
compare ref.h5 port.h5 --save result.json --junit result.xml --csv result.csv
compare ref.h5 bf16.h5 --save result16.json --junit result16.xml --csv result16.csv --rtol 0.01
& compare --from result.json
& compare --from result.json --atol 0.1 --by-module
compare --from result16.json --all --sort error
& compare ref.h5 other.h5
& compare ref.h5 wrong.h5
compare ref.h5 other.h5 --map none
compare ref.h5 other.h5 --require '*/output.logits' --map none
compare ref.h5 other.h5 --save mapped.json --csv mapped.csv
& compare --from mapped.json
& align ref.h5 other.h5
align ref.h5 other.h5 --all
align ref.h5 other.h5 -o map.toml
align ref.h5 wrong.h5 -o wrong.toml
align ref.h5 other.h5 -o map.json
& align ref.h5 other.h5 --by names
& align ref.h5 other.h5 --by values
& align ref.h5 other.h5 --map map.toml --by none
align ref.h5 port.h5
& align ref.h5 other.h5 --rules rules.toml
align ref.h5 other.h5 --rules wrong_rules.toml
& align other.h5 ref.h5
& compare ref.h5 other.h5 --map map.toml
& compare ref.h5 wrong.h5 --map wrong.toml --by-module
& compare other.h5 ref.h5
& compare padded.h5 padded_port.h5
& compare ref.h5 padded.h5
& preflight ref.h5 port.h5
& preflight ref.h5 bf16.h5 --reference-repeat again.h5
& preflight ref.h5 other.h5
& preflight ref.h5 padded.h5
& diagnose ref.h5 port.h5 0/model.layers.2.mlp.act_fn/output
diagnose ref.h5 port.h5 0/model.layers.2.mlp.act_fn/output --all
& diagnose ref.h5 shifted.h5 0/model.layers.3.input_layernorm/output
& diagnose ref.h5 wrong.h5 0/model.layers.2.mlp.down_proj/output --all
& diagnose ref.h5 bf16.h5 0/@root/output.logits
diagnose ref.h5 port.h5 0/nothing/output
& diagnose padded.h5 padded_port.h5 0/model.layers.1.self_attn/output.0
calibrate ref.h5 bf16.h5 port.h5 port16.h5 ref.h5 perturbed.h5 -o calibration.toml
calibrate ref.h5 bf16.h5 port.h5 port16.h5 -o cal2.toml --quantile 0.9 --margin 2 --metric mean_abs --json
calibrate ref.h5 port.h5 -o calibration3.toml
& compare ref.h5 bf16.h5 --calibration calibration.toml
compare ref.h5 port16.h5 --calibration cal2.toml
"""

_CULPRIT: Final = """
capture torch workloads.py:reference -o ref.h5
capture torch workloads.py:port -o port.h5
capture torch --like port.h5 --dtype bfloat16 -o port16.h5
capture torch workloads.py:wrong -o wrong.h5
capture torch workloads.py:scaled -o scaled.h5
& bisect ref.h5 port.h5
& bisect ref.h5 port16.h5
& bisect ref.h5 wrong.h5
bisect ref.h5 port.h5 --rtol 1e-2
bisect ref.h5 ref.h5
& bisect ref.h5 --target-model workloads.py:port
bisect ref.h5 --target-model workloads.py:wrong --state state.json
bisect ref.h5 --target-model workloads.py:wrong --state state.json
bisect ref.h5 --target-model workloads.py:port --level op
bisect ref.h5 --target-model workloads.py:other
& localize ref.h5 port.h5
& localize ref.h5 port16.h5
& localize ref.h5 port.h5 --reference-model none
& localize ref.h5 wrong.h5
& localize ref.h5 scaled.h5
& localize ref.h5 --target-model workloads.py:wrong
localize ref.h5 ref.h5
equivalence archives ref.h5 port.h5 --stage2 stage2.json --stage3 stage3.json
equivalence localize --from stage3.json
equivalence localize --from stage2.json
& replay ref.h5 port.h5
& replay ref.h5 port16.h5 --no-twin
& replay ref.h5 wrong.h5 --reference-model workloads.py:reference
& replay ref.h5
& replay ref.h5 --target-model workloads.py:wrong
replay ref.h5 --target-model workloads.py:port --reference-model workloads.py:reference --dtype bfloat16
inject ref.h5 --target-model workloads.py:port -o own.h5
inject ref.h5 --target-model workloads.py:wrong -o own_wrong.h5
inject ref.h5 --dtype bfloat16 -o own16.h5 --json
inject ref.h5 --target-model workloads.py:port --inject-outputs '*layers.2.mlp' -o graft.h5
inject ref.h5 --target-model workloads.py:port --inject-inputs '*layers.1' --dry-run --json
inject ref.h5 --target-model workloads.py:port --inject-inputs nothing -o none.h5
& compare ref.h5 own.h5
compare ref.h5 own_wrong.h5
compare ref.h5 own16.h5
compare ref.h5 graft.h5
localize ref.h5 own.h5
verify workloads.py:reference workloads.py:port -o report1
verify workloads.py:reference workloads.py:wrong -o report2 --layers
verify workloads.py:reference --dtype bfloat16 -o report3 --json
verify ref.h5 port16.h5 -o report4
verify workloads.py:llama -o report5
verify workloads.py:layered_reference workloads.py:layered -o report6 --num-hidden-layers 3
! verify workloads.py:reference workloads.py:scaled -o report7 --timeout 600
! bisect ref.h5 --target-model workloads.py:wrong --check 'test -e state.json'
inject ref.h5 --target-model workloads.py:nothing -o none2.h5
"""

_LOOK: Final = """
capture torch workloads.py:reference -o ref.h5
capture torch workloads.py:reference -o ref.zarr
capture torch workloads.py:reference -o ref.safetensors
capture torch workloads.py:port -o port.h5 --only '*.mlp*' --exclude '*up_proj*' --no-inputs
capture torch workloads.py:other -o other.h5 --params
capture torch workloads.py:reference -o part.h5 --slice '[..., :8]' --sample 1
capture torch workloads.py:reference -o stats.h5 --stats-only
capture torch workloads.py:reference -o small.h5 --max-bytes 100KB
capture torch workloads.py:reference --dry-run
capture torch workloads.py:reference --dry-run --json
capture torch --like ref.h5 --dry-run --print --print-only '*.layers.?'
capture torch --like ref.h5 --dry-run --print full --print-only '*.mlp.act_fn'
! capture script -o script.h5 -- script.py
& ls ref.h5
& ls ref.zarr '*layers.2.mlp' --sort size
ls ref.safetensors --sort max --stats
ls stats.h5 --sort l2
ls ref.h5 nothing
& show ref.h5
& show ref.h5 model.layers.2.mlp/output
& show ref.h5 model.layers.2.mlp/output --slice '[0, 0, :4]'
show part.h5 model.layers.2.mlp/output
show stats.h5 model.layers.2.mlp/output
show ref.h5 model.layers.2.mlp/outptu
show ref.h5 model.norm/output --npy norm.npy
& check ref.h5
& check ref.zarr
& check ref.safetensors
& check stats.h5
& check broken.h5
check broken.safetensors
ls broken.h5
& tree ref.h5
tree ref.h5 --depth 2 --params
tree ref.h5 --format compressed
tree ref.h5 --format full
tree ref.h5 --format paths
& tree ref.h5 --diff port.h5
& tree ref.h5 --diff other.h5
tree ref.h5 --diff workloads.py:port
tree llama --params
& tree llama --diff ref.h5
convert ref.h5 copy.zarr
convert ref.zarr copy.safetensors
convert ref.safetensors copy.h5 --json
convert ref.h5 ref.npz --only '*/output*'
convert ref.h5 packed.h5 --compress
convert ref.h5 packed.zarr --compress
convert ref.h5 blosc.h5 --codec blosc2
convert plain.npz plain.h5
convert plain.npz plain.zarr
convert plain.npz plain.safetensors
convert plain.npz plain2.npz --compress
& compare ref.h5 copy.h5
& compare ref.h5 packed.zarr
compare ref.h5 ref.npz --only '0/model.layers.0*/output*'
compare ref.h5 port.h5
compare ref.h5 part.h5
& compare ref.h5 stats.h5
compare ref.h5 small.h5
compare ref.h5 script.h5
compare plain.npz plain.h5
& compare plain.npz other.npz
compare plain.npz other.npz --only 'x*' --atol 1
& preflight ref.h5 part.h5
export ref.h5 dump --format max --only '0/model.layers.0*'
export ref.h5 torch_dump --format torch --only '0/*/output*'
import dump -o imported.h5 --json
import torch_dump -o imported.zarr
compare ref.h5 dump
& compare ref.h5 torch_dump
& align ref.h5 torch_dump
& compare dump torch_dump
recover ref.h5
& ls {tree}/tests/data/v1/small.h5
& check {tree}/tests/data/v1/small.zarr
& show {tree}/tests/data/v1/small.safetensors
& compare {tree}/tests/data/v1/small.h5 {tree}/tests/data/v1/small.safetensors
"""

_LOOK_INPUTS: Final = """
import numpy as np
rng = np.random.default_rng(0)
x = rng.standard_normal((3, 4, 5)).astype(np.float32)
ids = np.arange(12).reshape(3, 4)
tensors = {"x": x, "half": x.astype(np.float16), "ids": ids, "double": x.astype(float),
           "flag": x > 0, "complex": (x + 1j * x).astype(np.complex64), "empty": np.zeros((0, 3), np.float32),
           "nan": np.where(x > 1, np.nan, x), "scalar": np.float32(2)}
np.savez("plain.npz", **tensors)
np.savez("other.npz", **{**tensors, "x": x + 1e-3, "half": x[:2].astype(np.float16), "ids": ids + 1,
         "nan": x, "extra": x})
open("broken.h5", "wb").write(b"\\x89HDF\\r\\n\\x1a\\n" + bytes(100))
open("broken.safetensors", "wb").write(b"\\xff" * 30)
open("script.py", "w").write('''
import sys
sys.path.insert(0, ".")
import torch
import workloads
workload = workloads.reference()
with torch.no_grad():
    workload.model(**workload.inputs)
''')
from transformers import LlamaConfig
LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2).save_pretrained("llama")
"""

_THRESHOLDS: Final = """
open("thresholds.toml", "w").write('''
[[threshold]]
match = "*.mlp*"
rtol = 1e-1
[[threshold]]
match = "*.self_attn*"
metric = "relative_frobenius"
limit = 0.001
''')
open("rules.toml", "w").write('''
[[rename]]
from = "blocks"
to = "layers"
''')
open("wrong_rules.toml", "w").write("[[rule]]\\nfrom = 'a'\\n")
import numpy as np
x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
np.savez("one.npz", x=x, y=x)
np.savez("two.npz", x=x[None] + np.float32(1e-6), y=x.transpose(1, 0, 2))
"""

_WATCHED: Final = "transformers.models.llama.modeling_llama:LlamaMLP.forward:*"
_OPS: Final = """
capture torch workloads.py:reference -o ref.h5 --level op --ops-in '*.layers.2.mlp'
capture torch workloads.py:port -o port.h5 --level op --ops-in '*.layers.2.mlp'
capture torch --like ref.h5 --dtype bfloat16 -o bf16.h5
& compare ref.h5 port.h5
& compare ref.h5 bf16.h5
compare ref.h5 port.h5 --all --by-module
& show ref.h5 '0/model.layers.2.mlp:aten.mul.Tensor/output'
& ls ref.h5
& align ref.h5 port.h5
& localize ref.h5 port.h5
& diagnose ref.h5 port.h5 0/model.layers.2.mlp.act_fn/output
bisect ref.h5 port.h5
capture torch workloads.py:reference -o all.h5 --level op
capture torch workloads.py:port -o allport.h5 --level op
& compare all.h5 allport.h5
capture torch workloads.py:reference -o export.h5 --level export
capture torch workloads.py:port -o exportport.h5 --level export
& compare export.h5 exportport.h5
capture torch workloads.py:reference -o watch.h5 --watch '{watched}'
capture torch workloads.py:port -o watchport.h5 --watch '{watched}'
& compare watch.h5 watchport.h5
capture torch workloads.py:trained -o grads.h5 --grads --params
capture torch workloads.py:trained_port -o gradsport.h5 --grads --params
& compare grads.h5 gradsport.h5
compare grads.h5 gradsport.h5 --by-module
& align grads.h5 gradsport.h5
! inject ref.h5 --target-model workloads.py:port -o timed.h5 --timeout 600
capture torch workloads.py:failing -o failed.h5
& compare ref.h5 failed.h5
"""

_TRAINED: Final = (
    _EXAMPLES
    + """
def _run(model, **inputs):
    result = model(**inputs)
    result.loss.backward()
    return result

def trained():
    workload = models.reference()
    inputs = {**workload.inputs, "labels": workload.inputs["input_ids"]}
    return tensorcap.Workload(workload.model, inputs, _run)

def trained_port():
    workload = models.port()
    inputs = {**workload.inputs, "labels": workload.inputs["input_ids"]}
    return tensorcap.Workload(workload.model, inputs, _run)

def failing():
    workload = models.reference()
    workload.model.model.layers[2].mlp.act_fn = torch.nn.Linear(3, 3)
    return workload
"""
)

_STEPS: Final = """
capture torch llama --random-weights 0 --input-ids 1,2,3 --max-new-tokens 5 -o ref.h5
capture torch --like ref.h5 --dtype bfloat16 --teacher-forced ref.h5 -o bf16.h5
capture torch --like ref.h5 --teacher-forced ref.h5 --config hidden_act=gelu -o act.h5
capture torch --like ref.h5 --config rms_norm_eps=0.01 -o free.h5
capture torch --like ref.h5 --steps 0,2- -o some.h5
& compare ref.h5 bf16.h5
& compare ref.h5 act.h5
compare ref.h5 act.h5 --by-module --where
& compare ref.h5 free.h5
& compare ref.h5 some.h5
& preflight ref.h5 act.h5
& bisect ref.h5 act.h5
& localize ref.h5 act.h5
& localize ref.h5 bf16.h5
& replay ref.h5 act.h5
& diagnose ref.h5 act.h5 0/model.layers.0.mlp.act_fn/output
inject ref.h5 --config hidden_act=gelu -o own.h5 --steps 0,1
compare ref.h5 own.h5
& align ref.h5 act.h5
verify llama --random-weights 0 --input-ids '1,2,3,4;5,6,7,8' --dtype bfloat16 -o report1
verify llama llama --random-weights 0 --input-ids 1,2,3,4 --perturb bfloat16 -o report2
capture torch moe --random-weights 0 --input-ids '1,2,3,4,5,6;7,8,9,10,11,12' -o moe.h5
capture torch --like moe.h5 --dtype bfloat16 -o moe16.h5
capture torch --like moe.h5 --config num_experts_per_tok=1 -o moe1.h5
& compare moe.h5 moe16.h5
& compare moe.h5 moe1.h5
& localize moe.h5 moe1.h5
"""

_CONFIGS: Final = """
from transformers import LlamaConfig, MixtralConfig
sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, initializer_range=0.2)
LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained("llama")
MixtralConfig(**sizes, num_local_experts=4, architectures=["MixtralForCausalLM"]).save_pretrained("moe")
"""

_API: Final = """
& compare forward.h5 again.h5
& compare forward.h5 doubled.h5
& compare loop.h5 loop.zarr
& ls loop.h5
compare called.h5 forward.h5
show forward.h5
"""

_API_INPUTS: Final = """
import inspect
import re
import torch
import tensorcap
from tensorcap.testing import assert_matches
torch.manual_seed(0)
only = "only" if "only" in inspect.signature(tensorcap.capture).parameters else "include"  # of older trees

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.act(self.first(x))
        tensorcap.probe("hidden", hidden * 2)
        return {"out": self.second(hidden), "mask": hidden > 0}

model, x = Net().eval(), torch.randn(3, 4)
with torch.no_grad():
    for name in ("forward.h5", "again.h5"):
        with tensorcap.capture(model, name):
            model(x)
    for name in ("loop.h5", "loop.zarr"):
        with tensorcap.capture(model, name, **{only: "*first*"}):
            for scale in (1, 2, 3):
                model(scale * x)
    with tensorcap.capture_called("called.h5"):
        model(x)
    assert_matches("forward.h5", model)
    model.second.weight.mul_(2)
    with tensorcap.capture(model, "doubled.h5"):
        model(x)
    with open("assertion.txt", "w") as file:
        try:
            assert_matches("forward.h5", model, rtol=1e-5)
        except AssertionError as error:
            file.write(re.sub(r"/\\S+/tensorcap-\\w+/", "", str(error)))
result = tensorcap.compare("forward.h5", "doubled.h5")
with tensorcap.open_archive("forward.h5") as archive, open("records.txt", "w") as file:
    for record in archive.records:
        print(record.key.text, record.dtype, record.shape, archive.read(record).tobytes().hex(), file=file)
    print([(str(pair.key), str(pair.status)) for pair in result.pairs], file=file)
"""

PORTS: Final = ("llama", "qwen3_moe", "gpt2", "gemma3", "bert", "t5", "whisper", "vit")
FEW_PORTS: Final = ("gpt2", "t5")


def ports(names: Sequence[str]) -> Batch:
    """The ports of tests/alignment/ports, which have other names and layouts than their models."""
    workloads, commands = [], []
    for name in names:
        workloads.append(f"""
def {name}_ref():
    import tensorcap
    from tests.alignment.ports.{name} import PORT
    return tensorcap.Workload(*PORT.reference())

def {name}_tgt():
    import tensorcap
    from tests.alignment.ports.{name} import PORT
    model, inputs = PORT.reference()
    target, inputs = PORT.target(model.state_dict(), inputs)
    return tensorcap.Workload(target.eval(), inputs)
""")
        ref, tgt = f"{name}_ref.h5", f"{name}_tgt.h5"
        commands.append(f"""
capture torch workloads.py:{name}_ref -o {ref}
capture torch workloads.py:{name}_tgt -o {tgt}
& align {ref} {tgt}
align {ref} {tgt} -o {name}.toml
align {ref} {tgt} --by names --json
align {ref} {tgt} --by values --json
& compare {ref} {tgt}
compare {ref} {tgt} --map {name}.toml --by-module
& localize {ref} {tgt} --reference-model workloads.py:{name}_ref
& tree {ref} --diff {tgt}
""")
    return Batch("".join(commands), workloads="".join(workloads))


_TRAPS_INPUTS: Final = """
from pathlib import Path
from tests.alignment.ports.traps import TRAPS
from tests.alignment.ports.scoring import archive_of
for name, trap in TRAPS.items():
    archive_of(Path(f"{name}.ref.h5"), trap.reference)
    archive_of(Path(f"{name}.tgt.h5"), trap.target)
"""
_TRAP_NAMES: Final = (
    "constants twins shuffled negated scaled one_wrong_element swapped_names swapped_layers "
    "shifted_layers equal_layers symmetric square_weight transposed_weights as_many_layers_as_sequences "
    "fused_backwards coarser nothing_finite norms_of_ones another_layout reordered_heads unrelated "
    "swapped_halves swapped_halves_by_values shifted_tokens half_negated doubled one_scaled_layer "
    "repeated_layer off_by_one shuffled_layers equal_rows square_activation other_ids ids_as_results "
    "inverted_mask other_constants one_nan one_outlier cut_vocabulary near_twins fused_in_another_order "
    "fused_as_named swapped_weights fused_weights fused_weights_alone stacked_weights renamed_weights "
    "lost_weight other_gradient coarser_weights symmetric_weight not_transposed fused_twins "
    "misnamed_projections swapped_projections doubled_projection misnamed_behind_a_mistake "
    "misnamed_in_a_wrong_block"
)
TRAPS: Final = _TRAP_NAMES.split()
_TRAPS: Final = Batch(
    "".join(
        f"""
align {name}.ref.h5 {name}.tgt.h5 --all
align {name}.ref.h5 {name}.tgt.h5 --json
align {name}.ref.h5 {name}.tgt.h5 --by values --json
compare {name}.ref.h5 {name}.tgt.h5
compare {name}.ref.h5 {name}.tgt.h5 --json
"""
        for name in TRAPS
    ),
    prepare=_TRAPS_INPUTS,
)

# Entries of tests/zoo by architecture: a spread over mistakes and right ports.
FEW_ENTRIES: Final[Mapping[str, Sequence[str]]] = {
    "llama": ("llama_rope_layout", "llama_norm_eps", "llama_fused_qkv", "llama_rope_side_by_side"),
    "llama_decode": ("llama_cache_position",),
    "gpt2": ("gpt2_qkv_order",),
    "gemma2": ("gemma2_softcap",),
    "mixtral": ("mixtral_expert_order",),
    "t5": ("t5_buckets_one_sided",),
    "bert": ("bert_mask_ignored",),
    "mamba": ("mamba_step_bias",),
}
# Without the name of the architecture that each begins with.
_SUFFIXES: Final = {
    "llama": (
        "rope_theta rope_scaling rope_layout rope_keys_layout attention_scale attention_scale_of_width "
        "kv_repeat mask_off_by_one residual_twice norm_eps norm_variance norm_squares head_tied "
        "head_shifted as_it_is eager fused_gate_up fused_qkv rope_side_by_side padded_vocabulary "
        "tensor_parallel fused_norm compiled_activation compiled_norms wrapped"
    ),
    "qwen3": (
        "key_norm value_bias output_transposed output_accumulation softmax_precision rope_precision "
        "no_activation gate_and_up residual_missing as_it_is eager fused_gate_up"
    ),
    "gpt2": (
        "gelu_erf positions_from_one qkv_order dropout norm_eps conv1d_transposed output_bias as_it_is "
        "linear gelu eager"
    ),
    "gemma2": (
        "embedding_scale one_plus norm_cast softcap final_softcap window_off_by_one window_ignored "
        "gelu_erf query_scale as_it_is one_plus_stored scale_stored"
    ),
    "gemma3": "local_tables query_norm one_plus as_it_is eager",
    "mixtral": (
        "not_normalised expert_order gate_and_up one_expert as_it_is softmax_of_the_chosen every_expert"
    ),
    "qwen3_moe": "not_normalised router_precision activation as_it_is softmax_of_the_chosen eager",
    "gpt_oss": (
        "sinks limit alpha up_offset gate_in_blocks table_factor window_ignored softmax_over_all "
        "as_it_is gates_in_blocks sinks_afterwards"
    ),
    "t5": "attention_scaled buckets_one_sided head_scale activation cross_mask as_it_is eager",
    "whisper": (
        "positions_rolled decoder_position gelu_tanh final_norm convolution_shifted as_it_is eager "
        "scores_scaled"
    ),
    "bert": (
        "mask_ignored segments residual_missing head_bias heads_reversed gelu_tanh norm_eps as_it_is "
        "precise_attention written_norm"
    ),
    "vit": (
        "patch_order channel_order positions_rolled residual_twice norm_eps quick_gelu as_it_is "
        "patches_by_linear eager"
    ),
    "mamba": (
        "skip step_bias convolution_ahead scan_precision residual_precision as_it_is convolution_by_taps"
    ),
}
ALL_ENTRIES: Final = {
    **{name: [f"{name}_{end}" for end in ends.split()] for name, ends in _SUFFIXES.items()},
    "llama_decode": ["llama_cache_position", "llama_decode_as_it_is"],
}
WITH_MAPPING: Final = ("llama_rope_side_by_side", "llama_padded_vocabulary")
_ZOO_INPUTS: Final = """
from tests.zoo.catalogue import ENTRIES
for name in {names!r}:
    open(name + ".toml", "w").write(ENTRIES[name].mapping)
"""


def zoo(entries: Mapping[str, Sequence[str]], *, dtypes: Sequence[str], full: bool) -> Batch:
    """Entries of the zoo, by architecture: captured, compared and localized, in all ways if `full`."""
    workloads, commands = ["from tests.zoo.catalogue import ENTRIES\nfrom tests.zoo.entry import build\n"], []
    for architecture, names in entries.items():
        workloads.append(
            f"def {architecture}_ref():\n    return build(ENTRIES[{names[0]!r}], 'float32').reference\n"
        )
        ref, model = f"{architecture}.h5", f"workloads.py:{architecture}_ref"
        commands.append(f"capture torch {model} -o {ref}")
        for name in names:
            mapping = f"--map {name}.toml" if name in WITH_MAPPING else ""
            for dtype in dtypes:
                function = f"{name}_{dtype}"
                tgt = f"{function}.h5"
                workloads.append(
                    f"def {function}():\n    return build(ENTRIES[{name!r}], {dtype!r}).target\n"
                )
                trusted = f"--reference-model {model} {mapping}"
                commands.append(f"capture torch workloads.py:{function} -o {tgt}")
                if full and dtype == "float32":
                    commands.append(f"compare {ref} {tgt} {mapping} --json")
                    commands.append(f"localize {ref} {tgt} {trusted} --json")
                    continue
                commands.append(f"& compare {ref} {tgt} {mapping}")
                commands.append(f"& localize {ref} {tgt} {trusted}")
                if full:
                    commands.append(f"bisect {ref} {tgt} {mapping} --json")
                    commands.append(f"localize {ref} {tgt} --reference-model none {mapping} --json")
                    commands.append(f"localize {ref} --target-model workloads.py:{function} {mapping} --json")
                    commands.append(f"replay {ref} --target-model workloads.py:{function} {trusted} --json")
    used = [name for names in entries.values() for name in names if name in WITH_MAPPING]
    return Batch("\n".join(commands), workloads="".join(workloads), prepare=_ZOO_INPUTS.format(names=used))


DEFAULT: Final[Mapping[str, Batch]] = {
    "help": _HELP,
    "judge": Batch(_JUDGE, workloads=_EXAMPLES, prepare=_THRESHOLDS),
    "culprit": Batch(_CULPRIT, workloads=_EXAMPLES),
    "look": Batch(_LOOK, workloads=_EXAMPLES, prepare=_LOOK_INPUTS),
    "ops": Batch(_OPS.replace("{watched}", _WATCHED), workloads=_TRAINED),
    "steps": Batch(_STEPS, prepare=_CONFIGS),
    "api": Batch(_API, prepare=_API_INPUTS),
    "ports": ports(FEW_PORTS),
    "traps": _TRAPS,
    "zoo": zoo(FEW_ENTRIES, dtypes=("bfloat16",), full=False),
}
FULL: Final[Mapping[str, Batch]] = {
    **DEFAULT,
    "ports-all": ports(PORTS),
    **{
        f"zoo-{architecture}": zoo({architecture: names}, dtypes=("float32", "bfloat16"), full=True)
        for architecture, names in ALL_ENTRIES.items()
    },
}
