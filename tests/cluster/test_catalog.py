"""The catalog: names as people write them, figures as vendors mean them."""

from __future__ import annotations

import pytest

from zsim.cluster import catalog
from zsim.errors import InputError


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("H100", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("a100-sxm4-80gb", "A100-SXM-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("M3 Ultra", "Apple M3 Ultra"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("MI210", "MI210"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("H20-SXM", "H20"),
        ("H20-3e", "H20-141GB"),
        ("NVIDIA A10G", "A10G"),
        ("GH200 120GB", "GH200-96GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("RTX PRO 6000 Blackwell", "RTX PRO 6000 Blackwell WS"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell SE"),
        ("5090", "RTX 5090"),
        ("A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("A800-80GB", "A800-SXM-80GB"),
        ("H100-80GB SXM", "H100-SXM"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("B200", "B200-SXM"),
        ("GB300", "GB300"),
        ("A100-40GB SXM", "A100-SXM-40GB"),
        ("H200-141GB", "H200-SXM"),
        ("NVIDIA H200 141GB SXM", "H200-SXM"),
        ("H100 94GB NVL", "H100-NVL"),
    ],
)
def test_names_as_people_write_them(written: str, known: str) -> None:
    assert catalog.device(written).name == known


def test_an_unknown_gpu_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(InputError) as refused:
        catalog.device("H1000")
    assert "H100-SXM" in (refused.value.accepted or "")
    with pytest.raises(InputError, match="unknown GPU 'A100X'") as refused:
        catalog.device("A100X")
    assert "A100" in (refused.value.accepted or "")


@pytest.mark.parametrize("written", ["H100-64GB", "A100-64GB", "RTX 4090 48GB", "A100-16GB SXM"])
def test_another_memory_is_another_gpu(written: str) -> None:
    assert catalog.known_name(written) is None


def test_every_device_can_be_read_and_is_plausible() -> None:
    names = catalog.known_devices()
    assert len(names) >= 44
    for name in names:
        device = catalog.device(name)
        assert device.source
        # Vendors print GB and mean GiB for HBM and GDDR; Apple's GPUs get 75 % of the memory by default.
        if device.vendor == "CPU":
            continue
        assert 0.7 * device.memory_bytes < device.usable_bytes < 2**30 / 1e9 * device.memory_bytes
        assert device.memory_bandwidth > 1e11
        assert all(rate > 1e12 for rate in device.peak_flops.values())
        if device.nvlink_kind:
            reach, raw, _ = catalog.link_kind(device.nvlink_kind)
            assert reach <= raw


def test_what_vendors_mean_by_their_figures() -> None:
    h100 = catalog.device("H100-SXM")
    _, raw, _ = catalog.link_kind("nvlink4")
    assert raw * h100.nvlinks == 450e9  # "900 GB/s" are both directions
    reach, raw, _ = catalog.link_kind("pcie4")
    assert raw * 16 == pytest.approx(31.5e9, rel=1e-3)
    assert reach * 16 == 24e9
    assert h100.usable_bytes == pytest.approx(79.11 * 2**30, rel=1e-9)  # an "80 GB" card


@pytest.mark.parametrize(
    ("gpu", "dtype", "tflops", "gib", "gbps"),
    [  # dense, with fp32 accumulation; what torch.cuda.get_device_properties reports
        ("V100-SXM2-32GB", "float16", 125, 31.7, 900),
        ("RTX 2080 Ti", "float16", 53.8, 10.7, 616),
        ("RTX 3090", "bfloat16", 71, 23.7, 936),
        ("RTX 4090", "bfloat16", 165.2, 23.6, 1008),
        ("A40", "bfloat16", 149.7, 44.4, 696),
        ("L4", "bfloat16", 121, 22.0, 300),
        ("L40S", "bfloat16", 362, 44.4, 864),
        ("A100-SXM-40GB", "bfloat16", 312, 39.4, 1555),
        ("H200-SXM", "bfloat16", 989, 139.8, 4800),
        ("H20", "bfloat16", 148, 95.0, 4000),
        ("B200-SXM", "bfloat16", 2250, 178.3, 8000),
        ("MI210", "bfloat16", 181, 64.0, 1638),
        ("MI300X", "bfloat16", 1307, 192.0, 5300),
    ],
)
def test_sheets(gpu: str, dtype: str, tflops: float, gib: float, gbps: float) -> None:
    device = catalog.device(gpu)
    assert device.peak_flops[dtype] == tflops * 1e12
    assert device.usable_bytes / 2**30 == pytest.approx(gib, abs=0.06)
    assert device.memory_bandwidth == pytest.approx(gbps * 1e9, rel=1e-3)


def test_flash_attention_needs_ampere() -> None:
    lacking = {name for name in catalog.known_devices() if catalog.device(name).without_flash}
    assert lacking == {"V100-SXM2-16GB", "V100-SXM2-32GB", "V100-PCIe-16GB", "V100-PCIe-32GB", "T4", "RTX 2080 Ti"}


def test_pci_ids() -> None:
    assert catalog.by_pci_id("0x2330") == "H100-SXM"
    assert catalog.by_pci_id("0xffff") is None
