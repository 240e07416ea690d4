"""The capability table: what each generation of GPU turns on."""

from __future__ import annotations

import pytest
import torch

from kernl.runtime.capability import NO_CUDA, DeviceCapability, capability_of


def chip(major: int, minor: int) -> DeviceCapability:
    return DeviceCapability("chip", major, minor, sm_count=1, shared_memory_per_block=1, l2_bytes=1)


def test_a_cpu_tensor_has_no_architecture_and_no_feature() -> None:
    capability = capability_of(torch.zeros(1))
    assert capability == NO_CUDA
    assert capability.arch == 0
    assert not (capability.fuses_norms or capability.fuses_gemm_and_attention or capability.has_bf16)
    assert not (capability.has_tma or capability.has_pdl)


@pytest.mark.parametrize(
    ("major", "minor", "norms", "gemm", "hopper"),
    [(7, 0, False, False, False), (7, 5, True, False, False), (8, 0, True, True, False), (8, 9, True, True, False)]
    + [(9, 0, True, True, True), (10, 0, True, True, True)],
)
def test_features_by_generation(major: int, minor: int, norms: bool, gemm: bool, hopper: bool) -> None:
    capability = chip(major, minor)
    assert capability.arch == 10 * major + minor
    assert capability.fuses_norms is norms
    assert capability.fuses_gemm_and_attention is capability.has_bf16 is gemm
    assert capability.has_tma is capability.has_pdl is hopper


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), torch.device("meta")])
def test_other_devices_are_accepted_in_every_form(device: torch.device | str) -> None:
    assert capability_of(device).arch == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_without_a_gpu_a_cuda_device_has_architecture_zero() -> None:
    assert capability_of().arch == capability_of("cuda:0").arch == capability_of(0).arch == 0
