"""Times of single kernels: against measured ones, at their limits, and in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cluster import catalog
from zsim.cost.attention import visible_share
from zsim.cost.price import kernel_seconds, peak_flops, slowest
from zsim.cost.profile import load_profile
from zsim.errors import NotModeled
from zsim.model.kernels import Attention, Gemm, Memory

A100, H100 = catalog.device("A100-SXM-80GB"), catalog.device("H100-SXM")
GENERIC = load_profile("generic")
sizes = st.integers(1, 20_000)


def seconds(kernel, device=A100, profile=GENERIC):
    return kernel_seconds(kernel, device, profile)


# cuBLASLt on A100 (github.com/Azure/AI-benchmarking-guide 8fd0c6e1, ND_A100_v4) and vidur's profile (7d475133).
@pytest.mark.parametrize(
    ("m", "n", "k", "tflops"),
    [
        (2048, 2048, 2048, 221.8),
        (8192, 8192, 8192, 253.7),
        (4096, 22016, 4096, 220.8),
        (4096, 4096, 11008, 231.7),
        (2048, 8192, 28672, 237.5),
        (512, 57344, 8192, 225.5),
    ],
)
def test_generic_gemm_is_near_measured(m, n, k, tflops):
    gemm = Gemm(m, n, k, "float16")
    assert gemm.flops / seconds(gemm) == pytest.approx(tflops * 1e12, rel=0.2)


@given(sizes, sizes, sizes, st.integers(1, 64))
def test_gemm_beats_neither_peak_nor_memory(m, n, k, batch):
    gemm = Gemm(m, n, k, "bfloat16", batch)
    assert seconds(gemm) >= gemm.flops / A100.peak_flops["bfloat16"]
    assert seconds(gemm) >= gemm.bytes / A100.memory_bandwidth


@given(sizes, sizes, sizes, st.integers(0, 1000), st.sampled_from("mnk"))
def test_bigger_gemm_never_costs_less(m, n, k, more, which):
    small, big = {"m": m, "n": n, "k": k}, {"m": m, "n": n, "k": k}
    big[which] += more
    assert seconds(Gemm(**small, dtype="bfloat16")) <= seconds(Gemm(**big, dtype="bfloat16"))


@given(sizes, sizes, sizes)
def test_faster_device_is_never_slower(m, n, k):
    gemm = Gemm(m, n, k, "bfloat16")
    assert seconds(gemm, H100) <= seconds(gemm, A100)


def test_dtype_without_matrix_units_is_refused():
    with pytest.raises(NotModeled, match="float8"):
        seconds(Gemm(128, 128, 128, "float8"))


def attention(seq=4096, causal=True, backward=False, window=None, head_dim=128, impl="flash"):
    return Attention(2, 32, 8, seq, seq, head_dim, causal, impl, "bfloat16", backward, window)


def test_causal_attention_approaches_half_of_the_square():
    assert visible_share(attention(65536), 256) == pytest.approx(0.5, abs=0.003)
    assert visible_share(attention(256), 256) == 1.0
    assert visible_share(attention(causal=False), 256) == 1.0


def test_window_leaves_a_band():
    # 1024 of 16384 keys per query, less the triangle at the start, plus half a tile
    expected = (1024 - 1024**2 / (2 * 16384) + 128) / 16384
    assert visible_share(attention(16384, window=1024), 256) == pytest.approx(expected)
    assert visible_share(attention(4096, window=8192), 256) == visible_share(attention(4096), 256)


@given(st.integers(128, 30_000), st.booleans(), st.integers(1, 30_000))
def test_visible_share_is_a_share(seq, causal, window):
    assert 0 < visible_share(attention(seq, causal, window=window), 256) <= 1


# FlashAttention-2 on H100, head size 128, 16k tokens, hidden 2048 (arXiv 2407.08608), TFLOP/s of useful work.
@pytest.mark.parametrize(
    ("seq", "causal", "tflops"), [(1024, False, 350), (4096, False, 368), (2048, True, 299), (16384, True, 335)]
)
def test_flash_attention_2_on_h100(seq, causal, tflops):
    kernel = Attention(16384 // seq, 16, 16, seq, seq, 128, causal, "flash", "bfloat16")
    useful = kernel.flops / 2 if causal else kernel.flops
    # The profile holds what whole training steps sustain, which is below a lone kernel's speed.
    alone = useful / tflops / 1e12
    assert alone * 0.9 <= seconds(kernel, H100, load_profile("H100-SXM")) <= alone * 1.6


# FlashAttention 4 on B200, head size 128, 16 heads of 32k tokens (Dao-AILab/flash-attention pull requests 2280 and
# 2605, two machines), TFLOP/s of useful work.
@pytest.mark.parametrize(
    ("seq", "causal", "backward", "tflops"),
    [
        (8192, True, False, 1418.1),
        (8192, False, False, 1534.8),
        (8192, True, True, 1208.6),
        (8192, False, True, 1359.8),
        (1024, False, False, 975),
        (4096, True, False, 1062),
        (16384, False, False, 1330),
    ],
)
def test_flash_attention_4_on_b200(seq, causal, backward, tflops):
    kernel = Attention(32768 // seq, 16, 16, seq, seq, 128, causal, "flash4", "bfloat16", backward)
    useful = kernel.flops / 2 if causal else kernel.flops
    predicted = kernel_seconds(kernel, catalog.device("B200"), load_profile("B200-SXM"))
    assert predicted == pytest.approx(useful / tflops / 1e12, rel=0.1)


def test_unknown_implementation_falls_back_to_flash():
    assert seconds(attention(impl="fa4")) == seconds(attention(impl="flash"))


@pytest.mark.parametrize(
    ("gpu", "taken"), [("A100-SXM-80GB", "flash"), ("H200-SXM", "cudnn"), ("B200-SXM", "cudnn"), ("RTX 5090", "flash")]
)
def test_sdpa_takes_cudnn_where_the_gpu_has_it(gpu: str, taken: str):
    def of(impl: str) -> float:
        return kernel_seconds(attention(impl=impl), catalog.device(gpu), load_profile(gpu, "default"))

    assert of("sdpa") == of(taken)
    assert of("flash") != of("cudnn")


def test_memory_kernel_moves_bytes_at_its_kinds_share():
    copy = Memory("copy", 1e9, 1e9)
    assert seconds(copy) == pytest.approx(
        2e9 / (A100.memory_bandwidth * GENERIC.memory_efficiency["default"]), rel=0.01
    )


@given(st.floats(0, 1e10), st.floats(0, 1e10), st.integers(1, 100))
def test_memory_kernels_pay_for_launches(read, write, launches):
    kernel = Memory("residual", read, write, launches)
    assert seconds(kernel) >= launches * GENERIC.launch_gap


@pytest.mark.parametrize(("gpus", "deviations"), [(1, 0.0), (2, 0.564), (8, 1.424), (64, 2.343), (512, 3.044)])
def test_the_slowest_of_many(gpus, deviations):
    """Expected largest of normal deviates, as tabulated (Harter 1961; beyond 400 by integration)."""
    assert (slowest(gpus, 0.01) - 1) / 0.01 == pytest.approx(deviations, abs=0.06)


def test_products_of_int8_have_twice_the_peak_of_16_bits_where_there_are_any():
    """A100: 624 TOPS, H100: 1,979 (data sheets)."""
    assert peak_flops(A100, "int8") == pytest.approx(624e12)
    assert peak_flops(H100, "int8") == pytest.approx(1979e12, rel=1e-3)
    for gpu in ("V100-SXM2-32GB", "B300-SXM"):
        with pytest.raises(NotModeled, match="int8 matrix products"):
            peak_flops(catalog.device(gpu), "int8")


def test_rows_of_odd_sizes_cost_more():
    """pytorch/pytorch#181718, RTX 4090: 107 to 116 TFLOP/s beside 156."""
    even, odd = (seconds(Gemm(8192, 50257, 768, "bfloat16", unaligned=unaligned)) for unaligned in (False, True))
    assert even / odd == pytest.approx(0.71, rel=0.02)


@pytest.mark.parametrize("device", ["H100-SXM", "H200-SXM", "B200-SXM", "GB200", "MI300X", "RTX 4090"])
def test_the_memory_efficient_kernel_is_as_far_from_a100_as_flash_attention_2(device):
    """Both have Ampere's instructions; a file that says nothing of the one says it by the other."""
    profile = load_profile(device)
    for way in ("forward", "backward"):
        efficient, flash = (getattr(profile.attention[kernel], way) for kernel in ("efficient", "flash"))
        known = getattr(GENERIC.attention["efficient"], way) / getattr(GENERIC.attention["flash"], way)
        assert efficient / flash == pytest.approx(known)


@pytest.mark.parametrize("device", ["T4", "V100-SXM2-32GB"])
def test_a_file_may_say_its_own(device):
    assert load_profile(device).attention["efficient"].forward in (0.15, 0.2)
