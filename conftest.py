"""What is not collected if an optional package is absent, and how patient hypothesis is."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

# To collect is to import: also modules of the source, for their doctests.
NEEDED_BY = {
    "jinja2": ["tests/cli/test_report.py", "tests/reports", "tests/viewer"],
    "playwright": ["tests/viewer/test_browser.py"],
    "starlette": [
        "tensorcap/viewer/pages.py",
        "tensorcap/viewer/queries.py",
        "tensorcap/viewer/server.py",
        "tests/cli/test_view.py",
        "tests/viewer/test_server.py",
        "tests/viewer/test_browser.py",
    ],
    "torch": [
        "tensorcap/adapters/coreai",
        "tensorcap/adapters/huggingface",
        "tensorcap/adapters/neuron",
        "tensorcap/adapters/torch",
        "tests/alignment/ports",
        "tests/alignment/test_layers_apart.py",
        "tests/alignment/test_mistakes.py",
        "tests/alignment/test_traps.py",
        "tests/capture",
        "tests/cli/test_absent_extra.py",
        "tests/cli/test_import_export.py",
        "tests/cli/test_replay.py",
        "tests/cli/test_sensitivity.py",
        "tests/cli/test_verify.py",
        "tests/comparison/test_calls.py",
        "tests/comparison/test_inner_points_models.py",
        "tests/comparison/test_policy_models.py",
        "tests/comparison/test_testing.py",
        "tests/comparison/test_value_range.py",
        "tests/coreai",
        "tests/diagnosis/test_attention_variants.py",
        "tests/diagnosis/test_expert_weights.py",
        "tests/diagnosis/test_masks.py",
        "tests/diagnosis/test_mutations.py",
        "tests/diagnosis/test_operations.py",
        "tests/diagnosis/test_options.py",
        "tests/diagnosis/test_other_tensors.py",
        "tests/equivalence/knowledge_pictures.py",
        "tests/equivalence/own_models.py",
        "tests/equivalence/plain_ports.py",
        "tests/equivalence/test_downstream.py",
        "tests/equivalence/test_forced_decoding.py",
        "tests/equivalence/test_own_ports.py",
        "tests/equivalence/test_plain_ports.py",
        "tests/equivalence/test_port_stages.py",
        "tests/equivalence/test_token_runs.py",
        "tests/equivalence/test_token_stages.py",
        "tests/formats/test_dump_folder.py",
        "tests/formats/test_foreign_torch.py",
        "tests/formats/test_safetensors.py",
        "tests/hostile/test_hostile_torch.py",
        "tests/localization",
        "tests/max/ports",
        "tests/max/test_decoder.py",
        "tests/max/test_pipelines.py",
        "tests/max/test_ports.py",
        "tests/neuron",
        "tests/rerun",
        "tests/rewrites",
        "tests/sensitivities",
        "tests/support/models.py",
        "tests/support/transformers_models.py",
        "tests/test_cases_capture.py",
        "tests/trained",
        "tests/upgrades",
        "tests/zoo",
        "tests/max/tiny_folders.py",
    ],
    "torchao": ["tests/rerun/test_torchao.py"],
    "transformers": [
        "tests/alignment/ports",
        "tests/alignment/test_ports.py",
        "tests/capture/test_architectures.py",
        "tests/capture/test_export.py",
        "tests/capture/test_graph.py",
        "tests/capture/test_huggingface.py",
        "tests/capture/test_ops.py",
        "tests/capture/test_phases.py",
        "tests/capture/test_teacher_forcing.py",
        "tests/cli/test_verify.py",
        "tests/comparison/test_inner_points_models.py",
        "tests/comparison/test_policy_models.py",
        "tests/coreai",
        "tests/diagnosis/test_attention_variants.py",
        "tests/diagnosis/test_expert_weights.py",
        "tests/equivalence/knowledge_pictures.py",
        "tests/equivalence/own_models.py",
        "tests/equivalence/plain_ports.py",
        "tests/equivalence/test_downstream.py",
        "tests/equivalence/test_forced_decoding.py",
        "tests/equivalence/test_own_ports.py",
        "tests/equivalence/test_plain_ports.py",
        "tests/equivalence/test_port_stages.py",
        "tests/equivalence/test_token_runs.py",
        "tests/equivalence/test_token_stages.py",
        "tests/localization/llama.py",
        "tests/localization/test_calls_without_tensors.py",
        "tests/localization/test_exit_statuses.py",
        "tests/localization/test_padding.py",
        "tests/localization/test_routers_with_ties.py",
        "tests/localization/test_seeded_bugs.py",
        "tests/localization/test_states.py",
        "tests/localization/test_verifying.py",
        "tests/max/ports",
        "tests/max/test_decoder.py",
        "tests/max/test_pipelines.py",
        "tests/max/test_ports.py",
        "tests/max/tiny_folders.py",
        "tests/neuron/lookalike",
        "tests/neuron/nxdi_ports.py",
        "tests/neuron/test_port_on_ranks.py",
        "tests/rerun/test_dynamic_quantisation.py",
        "tests/rerun/test_forward_replay.py",
        "tests/rerun/test_injecting.py",
        "tests/rerun/test_replaying.py",
        "tests/rewrites",
        "tests/sensitivities/models.py",
        "tests/sensitivities/test_llama.py",
        "tests/support/transformers_models.py",
        "tests/trained",
        "tests/upgrades",
        "tests/zoo",
    ],
    "zarr": [
        "tests/cli/test_ls.py",
        "tests/cli/test_show.py",
        "tests/comparison/test_recorded_digests.py",
        "tests/formats/test_conversion.py",
        "tests/formats/test_zarr.py",
        "tests/hostile/test_hostile_zarr.py",
    ],
    "gguf": ["formats/tensorcap_formats/foreign/gguf_file.py", "tests/formats/test_gguf.py"],
    "onnx": [
        "formats/tensorcap_formats/foreign/onnx_file.py",
        "formats/tensorcap_formats/foreign/onnx_test_data.py",
        "tensorcap/adapters/onnx",
        "tests/formats/test_onnx.py",
        "tests/onnx",
    ],
    "onnxruntime": ["tensorcap/adapters/onnx", "tests/onnx"],
    "coreai_torch": ["tensorcap/adapters/coreai", "tests/coreai"],
    "av": ["tests/max/test_pipelines.py"],
    "max": [
        "tensorcap/adapters/max",
        "tests/max/nets.py",
        "tests/max/ports",
        "tests/max/test_capturing.py",
        "tests/max/test_decoder.py",
        "tests/max/test_compilation.py",
        "tests/max/test_engine.py",
        "tests/max/test_foreign.py",
        "tests/max/test_injecting.py",
        "tests/max/test_pipelines.py",
        "tests/max/test_ports.py",
    ],
}

collect_ignore = [path for name, paths in NEEDED_BY.items() if find_spec(name) is None for path in paths]
collect_ignore.append("tests/neuron/lookalike")  # has a path of its own, which stands for absent packages

# No test fails because a machine is slow.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share out the cases of sampled tests: every other one is slow, which CI runs."""
    counts: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("sampled"):
            name = item.nodeid.partition("[")[0]
            item.add_marker("entries" if counts[name] % 2 else "slow")
            counts[name] += 1
