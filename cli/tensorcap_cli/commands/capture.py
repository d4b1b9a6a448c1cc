"""`tcap capture`: run a model and keep what happens in it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from tensorcap_cli.commands.capture_on_ranks import RanksCommand, capture_on_ranks, ranks_to_start
from tensorcap_cli.commands.capture_script import script_command
from tensorcap_cli.options.neuron_sources import neuron_sources_option
from tensorcap_cli.options.recording import (
    coreai_option,
    intermediates_beside,
    recording_arguments,
    recording_options,
    recording_options_of_assets,
    recording_options_of_graphs,
)
from tensorcap_cli.options.run import (
    asset_options,
    function_options,
    graph_file_options,
    like_option,
    make_recipe,
    pipeline_options,
    program_options,
    run_options,
    tp_option,
)
from tensorcap_cli.options.sections import Command
from tensorcap_cli.options.time_limit import time_limit_option
from tensorcap_cli.text.capture import print_outcome
from tensorcap_cli.text.graph_dump import graph_dump_lines
from tensorcap_cli.text.progress import capture_progress

if TYPE_CHECKING:
    from tensorcap_formats.run_info import ScopeInfo


@click.group("capture", short_help="Run a model and keep the inputs and outputs of every module.")
def command() -> None:
    """Run a model and keep the inputs and outputs of every module in an archive.

    \b
        tcap capture torch MODEL --prompt "Hello" -o ref.h5
        tcap capture max port.py:target -o tgt.h5
        tcap capture coreai net.aimodel --inputs inputs.npz -o tgt.h5
        tcap capture onnx net.onnx --inputs inputs.npz -o tgt.h5
        tcap capture jax port.py:target -o tgt.h5
        tcap capture executorch net.pte --inputs inputs.npz -o tgt.h5
        tcap capture neuron port.py:target --tp 2 -o tgt.h5
        tcap capture script -o ref.h5 -- generate.py --prompt "Hello"

    Modules find the block; --level op, --watch and --grads open it. --steps, --sample, --slice and
    --max-bytes keep the archive small. --print lists the tensors as they come, for diff.

    Exit status: see the help of each framework.
    """


command.add_command(script_command)


@command.command("torch", cls=Command)
@click.argument("model", metavar="[MODEL]", required=False)
@recording_options
@coreai_option
@like_option
@run_options
def torch_command(
    model: str | None,
    *,
    like: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Capture one run of MODEL: a Hugging Face model by folder or id, or FILE.py:FUNCTION.

    The function returns tensorcap.Workload(model, inputs). A glob without a slash is for sites (modules),
    any other for whole keys STEP/SITE/SLOT.

    \b
        tcap capture torch meta-llama/Llama-3.2-1B --prompt "The sky is" -o ref.h5
        tcap capture torch ./config-only --random-weights 0 --input-ids 1,2,3 -o ref.h5
        tcap capture torch bench.py:small --only '*.mlp' --no-inputs -o mlp.h5
        tcap capture torch --like ref.h5 --dtype bfloat16 -o tgt.h5

    First the block, then what is in it:

    \b
        tcap capture torch --like ref.h5 --level op --ops-in '*.layers.3.mlp' -o ops.h5
        tcap capture torch --like ref.h5 -o inner.h5 \\
            --watch 'transformers.models.llama.modeling_llama:LlamaMLP.forward:down_proj'

    Generation, with the same tokens on both sides; a step is a token:

    \b
        tcap capture torch MODEL --prompt "The sky is" --max-new-tokens 20 --steps 0,5- -o ref.h5
        tcap capture torch --like ref.h5 --dtype bfloat16 --teacher-forced ref.h5 -o tgt.h5

    A reference for a conversion to Core AI, and ref.aimodelintermediates beside it for Apple's debugger:

    \b
        tcap capture torch MODEL --prompt "The sky is" --coreai -o ref.h5

    A log for diff, and no archive:

    \b
        tcap capture torch --like ref.h5 --dry-run --print --only '*.layers.?' > ref.txt

    Weights have the precision of the checkpoint unless --dtype says another; random ones are float32. An
    error or Ctrl-C keeps what was recorded until then as an incomplete archive, and never in the place of
    a complete one.

    Exit status: 0 captured; 1 the run failed, or something that was asked for could not be captured, or a
    call did not return, or --max-bytes was reached; 2 wrong usage; 3 an input file cannot be read; 130
    interrupted.
    """
    _capture("torch", model, like, options, as_json=as_json)


@command.command("max", cls=Command)
@click.argument("model", metavar="[MODEL]", required=False)
@recording_options_of_graphs
@like_option
@pipeline_options
@time_limit_option
def max_command(
    model: str | None,
    *,
    like: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Capture one run of MODEL in Modular MAX: FILE.py:FUNCTION, or MAX's pipeline for a folder or an id.

    The function returns tensorcap.Workload(module, inputs): a max.nn module whose weights are loaded, and
    numpy arrays by argument. Each call of each module is recorded, under the names that torch would give,
    with the shapes of the run. See examples/max_decoder.py for all that a port needs.

    \b
        tcap capture max port.py:target -o tgt.h5
        tcap capture max port.py:target --only 'layers.0.*' --print --dry-run
        tcap capture max port.py:target --num-hidden-layers 1 --timeout 1800 -o tgt.h5
        tcap compare ref.h5 tgt.h5

    A folder or an id of a Hugging Face model is run by the architecture that MAX has for it, as max serve
    would: one forward of all tokens, with an empty cache and without pooling.

    \b
        tcap capture max google/gemma-3-1b-it --encoding bfloat16 --devices gpu --prompt Hi -o tgt.h5
        tcap verify max:google/gemma-3-1b-it --encoding bfloat16 --devices gpu --prompt Hi -o report/

    MAX compiles the model, which takes minutes the first time and seconds from its cache, in
    ~/.cache/modular. A graph that returns its tensors is compiled differently from one that does not: the
    model is run without that too, and the distance between both is printed. --timeout ends a compiler that
    hangs, reports one that died, and keeps what it wrote.

    A module that MAX fuses with others (gate_proj and up_proj of an MLP) is never called, and listed as such.
    --inner keeps what lies within a subgraph; a model built with use_subgraphs=False has none, and can be
    injected everywhere. Caches cannot be captured. `tcap capture script` captures another program's own graph
    and its calls.

    Exit status: as for tcap capture torch.
    """
    _capture("max", model, like, options, as_json=as_json)


@command.command("coreai", cls=Command)
@click.argument("model", metavar="[MODEL]", required=False)
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="Convert what FILE.py:FUNCTION returns, a torch module or an exported program; the same as MODEL.",
)
@click.option(
    "--keep", metavar="DIR", type=click.Path(), help="Keep the asset of a conversion, as NAME.aimodel."
)
@recording_options_of_assets
@like_option
@asset_options
@time_limit_option
def coreai_command(
    model: str | None,
    *,
    source: str | None,
    keep: str | None,
    like: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Capture one run of MODEL, an asset NAME.aimodel of Apple's Core AI, or FILE.py:FUNCTION to convert.

    The function returns tensorcap.Workload(model, inputs) with a torch module, an exported program or a
    tensorcap.CoreAIModel. The output of each operation is recorded under the name of the node of the
    decomposed graph that it computes, in its module: a reference with the same names is captured by
    tcap capture torch --level export --coreai.

    \b
        tcap capture coreai net.aimodel --inputs inputs.npz -o tgt.h5
        tcap capture coreai net.aimodel --inputs random --inputs mask=ones --seed 1 -o tgt.h5
        tcap capture coreai --from port.py:module --precision fp16 --keep net.aimodel -o fp16.h5
        tcap capture coreai net.aimodel --like ref.h5 -o tgt.h5
        tcap compare ref.h5 tgt.h5

    --like takes the inputs of an archive; without MODEL it repeats its run, with the settings given here.
    Random integers are 0 or 1. Of an asset converted in release mode only inputs and outputs are known.
    An operation that is fused with others has no value, and is listed with what it was fused with.

    Exit status: as for tcap capture torch.
    """
    from tensorcap_formats.errors import UsageError

    if model is not None and source is not None:
        raise UsageError(f"MODEL {model} and --from {source} are both what is run, expected one")
    _capture("coreai", model or source, like, options, as_json=as_json, keep=keep)


@command.command("onnx", cls=Command)
@click.argument("model", metavar="[MODEL]", required=False)
@recording_options_of_assets
@like_option
@graph_file_options
@time_limit_option
def onnx_command(
    model: str | None,
    *,
    like: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Capture one run of MODEL, a file NAME.onnx, in ONNX Runtime; or FILE.py:FUNCTION.

    The function returns tensorcap.Workload(tensorcap.OnnxModel("net.onnx"), inputs). The values of each node
    are recorded, and the arguments and results of each module of the model that was exported, whose names the
    graph keeps (torch.export, TorchScript, optimum): a reference is captured by tcap capture torch.

    \b
        tcap capture onnx net.onnx --inputs inputs.npz -o tgt.h5
        tcap capture onnx net.onnx --inputs random --inputs mask=ones --seed 1 -o tgt.h5
        tcap capture onnx net.onnx --like ref.h5 --optimization none -o tgt.h5
        tcap compare ref.h5 tgt.h5

    --like takes the inputs of an archive. Random integers are 0 or 1. The graph is run in sections, so that
    not all values are in memory at once. A graph that returns all its values is not optimised as one that
    does not: the model is run without taps too, and the distance between both is printed, and what was fused.

    Branches and bodies of loops (If, Loop, Scan) are listed, and not entered.

    Exit status: as for tcap capture torch.
    """
    _capture("onnx", model, like, options, as_json=as_json)


@command.command("executorch", cls=Command)
@click.argument("model", metavar="[MODEL]", required=False)
@recording_options_of_assets
@like_option
@program_options
@time_limit_option
def executorch_command(
    model: str | None,
    *,
    like: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Capture one run of MODEL, a program NAME.pte of ExecuTorch, on this machine; or FILE.py:FUNCTION.

    The function returns tensorcap.Workload(tensorcap.ExecuTorchModel("net.pte"), inputs). The ETRecord of
    the same export, NAME.etrecord beside the program unless --etrecord names another, says which operator
    is which node of which module. A reference is captured by tcap capture torch.

    
        tcap capture executorch net.pte --inputs inputs.npz -o tgt.h5
        tcap capture executorch net.pte --like ref.h5 --etrecord build/etrecord.bin -o tgt.h5
        tcap compare ref.h5 tgt.h5

    --like takes the inputs of an archive. Random integers are 0 or 1. What a delegate computes is listed, and
    only its results have values: export with portable kernels to see within.

    Exit status: as for tcap capture torch.
    """
    _capture("executorch", model, like, options, as_json=as_json)


@command.command("jax", cls=Command)
@click.argument("model", metavar="[MODEL]", required=False)
@recording_options_of_assets
@like_option
@function_options
def jax_command(
    model: str | None,
    *,
    like: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Capture one run of MODEL, FILE.py:FUNCTION of a model of JAX: a module of Flax, or a function.

    The function returns tensorcap.Workload(model, inputs). The model is a module of flax.nnx, or a
    tensorcap.JaxModel: of a module of flax.linen and its variables, or of a function and its parameters. Each
    call of each module is recorded, in what JAX compiles too, and in loops by number.

    
        tcap capture jax port.py:target -o tgt.h5
        tcap capture jax port.py:target --like ref.h5 --params -o tgt.h5
        tcap compare ref.h5 tgt.h5

    A function has no modules: in its code JaxModel.tap("layers.0.attention", x) records a value as the
    result of one, best by the name that it has in the reference, and tensorcap.probe("scores", x) a value
    that both sides name.

    --like takes the inputs of an archive. Taps end the fusion of kernels: the model is run without them too,
    and the distance between both is printed.

    Exit status: as for tcap capture torch.
    """
    _capture("jax", model, like, options, as_json=as_json)


@command.command("neuron", cls=RanksCommand)
@click.argument("model", metavar="[MODEL]", required=False)
@tp_option
@recording_options
@like_option
@function_options
@neuron_sources_option
@time_limit_option
def neuron_command(
    model: str | None,
    *,
    tp: int,
    like: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Capture one run of MODEL, FILE.py:FUNCTION of a port to NxD Inference, on CPUs.

    The function returns tensorcap.Workload(application, inputs), or of the inner module. Of an application
    the inner module is captured, which to_cpu() makes if it is not there yet, and the application is called.
    Hooks do not fire in the graph of a device: see tcap plan for that.

    Sources of NxD Inference are not ours to ship: --neuron-src names a checkout of them, twice for both, or a
    folder that holds both. What they import of a Neuron runtime that is not installed is then a stand-in: the
    archive lists those that were called, and a call of one that would have to compute something ends the run.

    \b
        tcap capture neuron port.py:target --neuron-src ~/neuronx -o tgt.h5
        tcap capture neuron port.py:target --tp 4 -o tgt.h5
        tcap compare ref.h5 tgt.h5

    With --tp 4 four processes run the function, which joined each other over gloo before. Each writes an
    archive of its own, tgt.rank0.h5 and so on, and these are merged into tgt.h5. What a tensor is a part of
    is known by the class of its layer (ColumnParallelLinear, gather_output false: columns), else as tcap
    merge finds it, whose help has the rules. If a process dies, its log stays as tgt.rank1.log, and the
    others are ended. Under torchrun each process captures its own rank.

    Exit status: as for tcap capture torch; 1 too if ranks hold unlike what should be the same, or something
    could not be merged.
    """
    count = ranks_to_start(tp)
    if count > 1:
        capture_on_ranks(count, options, as_json=as_json)
    else:
        _capture("neuron", model, like, options, as_json=as_json)


def _capture(
    framework: str,
    model: str | None,
    like: str | None,
    options: dict[str, Any],
    *,
    as_json: bool,
    keep: str | None = None,
) -> None:
    """Run a model and print what came of it.

    Args:
        framework: The framework that runs it.
        model: A path as `Recipe` takes it, or None for that of the archive.
        like: The archive whose run is repeated, or None.
        options: The options of the run and of what is recorded.
        as_json: Whether the outcome is printed as JSON.
        keep: Where a conversion is kept, of a framework that converts models; or None.
    """
    from tensorcap.adapters import export_graph
    from tensorcap.session import capture_workload
    from tensorcap_formats.open import open_archive

    folder = intermediates_beside(options)
    with ExitStack() as files:
        before = None if like is None else files.enter_context(open_archive(like))
        kept = None if before is None else before.info.scope
        if kept is not None and framework in ("coreai", "executorch", "jax", "onnx"):
            kept = _outermost(kept)
        recording = recording_arguments(options, kept, as_json=as_json)
        recipe, inputs = make_recipe(model, before, options, framework=framework)
    if framework != "torch":  # also a torch model of an archive, which is converted, or has a pipeline
        recipe = replace(recipe, framework=framework)
    if framework == "max" and not recording["only"] and not recording["exclude"]:
        recording["injectable"] = ("input", "output")  # the graph that verify, inject and bisect need
    workload = recipe.build(inputs)
    if keep is not None:
        workload.model.check_path(keep)
    with capture_progress(is_live="log" not in recording) as progress:
        capture = capture_workload(
            workload, run={"workload": recipe.describe()}, progress=progress, **recording
        )
    if keep is not None:
        workload.model.save(keep)
    status = print_outcome(capture, as_json=as_json)
    if folder is not None:
        with open_archive(recording["path"]) as archive:
            click.echo("\n".join(graph_dump_lines(export_graph(archive, folder))), err=True)
    if status:
        click.get_current_context().exit(status)


def _outermost(kept: ScopeInfo) -> ScopeInfo:
    """What a run recorded, without what only code that runs as it is written can give."""
    return replace(
        kept, level="", decompositions="", ops_in=(), watch=(), grads=False, params=False, eager=False
    )
