"""The report tells everything, in text, in HTML and as plain data."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import kernl
from kernl.options import Options
from kernl.report import (
    KernlWarning,
    Report,
    forget_warnings,
    gpu_time_by_implementation,
    implementation_of,
    reason_of,
    warn_once,
)
from tests import tiny


def test_before_the_first_call() -> None:
    report = Report("Encoder", Options(strict=True))
    text = str(report)
    assert "Encoder" in text and "strict=True" in text and "nothing has been compiled yet" in text
    assert report.as_dict()["graphs"] == [] and "nothing has been compiled" in report._repr_html_()


@pytest.fixture(scope="module")
def used_report() -> Report:
    model = kernl.optimize_model(tiny.encoder())
    with torch.no_grad():
        for _ in range(3):
            model(tiny.activations())
        model.train()
        model(tiny.activations())
    return model.kernl.report()


def test_patterns_with_counts_and_refusals(used_report: Report) -> None:
    assert used_report.matched("linear_gelu") == 4
    assert used_report.matched("dropout") == 2  # of the two graphs, the one in eval mode
    text = str(used_report)
    assert "dropout is active" in text and "kernl::linear" in text and "calls left as they were" in text


def test_graphs_and_calls(used_report: Report) -> None:
    plain = used_report.as_dict()
    assert [graph["lowering"] for graph in plain["graphs"]] == ["eager", "eager"]
    assert all(graph["no_cuda_graph_because"] == "inputs are on the CPU" for graph in plain["graphs"])
    assert plain["calls"]["direct"] == 2 and plain["calls"]["guarded"] == 2
    assert "2 through the front door" in str(used_report)


def test_as_dict_is_plain_data(used_report: Report) -> None:
    assert json.loads(json.dumps(used_report.as_dict()))["subject"] == "Encoder"


def test_html(used_report: Report) -> None:
    page = used_report._repr_html_()
    assert page.count("<table") >= 2 and "linear_gelu" in page


def test_notes_count_up() -> None:
    report = Report()
    report.new_graph()
    report.note("something")
    report.note("something")
    assert report.as_dict()["notes"] == {"something": 2} and "something" in str(report)


def test_warn_once() -> None:
    forget_warnings()
    with pytest.warns(KernlWarning, match="first"):
        assert warn_once("test-key", "first")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not warn_once("test-key", "second")


def test_reason_of_is_one_line() -> None:
    assert reason_of(ValueError("\n  the first line \nthe second")) == "ValueError: the first line"
    assert reason_of(KeyError()) == "KeyError"


@pytest.mark.parametrize(
    ("kernel", "implementation"),
    [
        ("kernl_attention_forward", "kernl (Triton)"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "cuBLAS"),
        ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64", "cuBLAS"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "cuBLAS"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm>", "cuBLAS"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "cuDNN"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "PyTorch attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", "PyTorch attention"),
        ("triton_per_fused_add_native_layer_norm_0", "Inductor (Triton)"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "PyTorch"),
    ],
)
def test_whose_kernel(kernel: str, implementation: str) -> None:
    assert implementation_of(kernel) == implementation


def test_gpu_time_needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        assert gpu_time_by_implementation(lambda: None) == {}
