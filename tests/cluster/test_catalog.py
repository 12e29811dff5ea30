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


def test_pci_ids() -> None:
    assert catalog.by_pci_id("0x2330") == "H100-SXM"
    assert catalog.by_pci_id("0xffff") is None
