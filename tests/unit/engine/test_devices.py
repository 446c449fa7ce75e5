from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from tinker_cookbook.engine import devices
from tinker_cookbook.engine.devices import (
    choose_device,
    cpu_threads,
    free_memory_bytes,
    peak_memory_bytes,
)
from tinker_cookbook.exceptions import ConfigurationError

_CPU = torch.device("cpu")
_NO_GPU = not torch.cuda.is_available() and not torch.backends.mps.is_available()


@pytest.mark.parametrize(
    ("flags", "dtype", "said"),
    [
        ({"avx2"}, torch.float32, "does not compute bfloat16"),
        ({"avx512f", "avx512_bf16"}, torch.bfloat16, "(avx512_bf16)"),
        ({"avx512_bf16", "amx_bf16"}, torch.bfloat16, "(amx_bf16)"),
        ({"asimd", "bf16"}, torch.bfloat16, "(bf16)"),
    ],
)
def test_a_cpu_uses_bfloat16_where_it_computes_it(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], dtype: torch.dtype, said: str
):
    monkeypatch.setattr(devices, "_cpu_flags", lambda: flags)
    choice = choose_device("cpu")
    assert (choice.device, choice.dtype) == (_CPU, dtype)
    assert said in choice.dtype_reason
    asked = choose_device("cpu", "bf16")
    assert asked.dtype == torch.bfloat16
    assert ("emulates" in asked.dtype_reason) == (dtype == torch.float32)


@pytest.mark.skipif(not _NO_GPU, reason="this machine has a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused():
    choice = choose_device()
    assert choice.device == _CPU
    assert choice.device_reason == "no GPU was found"
    for asked in ("cuda", "cuda:1"):
        with pytest.raises(ConfigurationError, match=f"device: got '{asked}'.*set device=cpu"):
            choose_device(asked)
    with pytest.raises(ConfigurationError, match="no Apple GPU"):
        choose_device("mps")


def test_a_gpu_index_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1", "float16").device == torch.device("cuda:1")
    with pytest.raises(ConfigurationError, match=r"shows 2 GPU\(s\), cuda:0 to cuda:1"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("device", "dtype", "said"),
    [
        ("gpu", "auto", "expected auto, cuda, cuda:N, mps or cpu"),
        ("cuda:x", "auto", "device: got 'cuda:x'"),
        ("cpu", "flot32", "did you mean 'float32'"),
        ("cpu", "float16", "float16 is offered on cuda only"),
        ("cpu", "fp16", "set dtype=float32 or dtype=bfloat16"),
    ],
)
def test_invalid_devices_are_refused(device: str, dtype: str, said: str):
    with pytest.raises(ConfigurationError) as raised:
        choose_device(device, dtype)
    assert said in str(raised.value)


def test_free_memory_falls_and_the_peak_stays():
    free, peak = free_memory_bytes(_CPU), peak_memory_bytes(_CPU)
    assert 0 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    held = torch.ones(256 * 2**20, dtype=torch.uint8)
    risen = peak_memory_bytes(_CPU)
    del held
    assert risen >= peak
    assert risen == pytest.approx(
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, rel=0.1
    )
    assert peak_memory_bytes(_CPU) >= risen


def test_a_containers_limits_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(devices, "_CGROUP", tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert cpu_threads() == cores
    without = free_memory_bytes(_CPU)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert free_memory_bytes(_CPU) == pytest.approx(without, rel=0.2)
    (tmp_path / "memory.max").write_text("10000\n")
    assert free_memory_bytes(_CPU) == 7000
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500\nactive_file 9\n")
    assert free_memory_bytes(_CPU) == 7500
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert cpu_threads() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_threads() == cores
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert cpu_threads() == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    choice = choose_device()
    assert choice.device.type == "cuda"
    assert torch.cuda.get_device_name() in choice.device_reason
    free = free_memory_bytes(choice.device)
    held = torch.zeros(2**28, dtype=torch.uint8, device=choice.device)
    assert free - free_memory_bytes(choice.device) >= 2**28
    assert peak_memory_bytes(choice.device) >= 2**28
    del held
