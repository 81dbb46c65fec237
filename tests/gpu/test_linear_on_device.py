"""Linear layers with weights of a few bits on a CUDA device: against f64, compiled by torch, in CUDA graphs, without a wait."""

import pytest
import torch
from torch.library import opcheck

import tilewright
from tilewright.dtype import S4
from tilewright.errors import InputError
from tilewright.linear.kernels import FEW_ROWS
from tilewright.runtime.quantized_weight import QuantizedWeight
from tilewright.runtime.weight_formats import from_torch_int4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 3e-4}


def quantised(scheme, dtype, inner=512, out=384, bias=True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(inner, out, bias=bias)).to(dtype)
    tilewright.quantize_(model, scheme)
    return model.requires_grad_(False).cuda()


def error(layer, x):
    few = layer.code_type.endswith("4") and x[..., 0].numel() <= FEW_ROWS and not layer.quantize_activations
    few = few and torch.cuda.get_device_capability() == (9, 0)
    weight = layer.weight.dequantize(torch.float32 if layer.offsets is not None or few else x.dtype)
    expected = x.double() @ weight.double().t()
    expected = expected if layer.bias is None else expected + layer.bias.double()
    return float((layer(x).double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("w4g64", torch.float16),
        ("w4g64", torch.bfloat16),
        ("w4g32z", torch.float16),
        ("w4g128z", torch.bfloat16),
        ("w8", torch.float16),
        ("w4g64", torch.float32),
    ],
)
def test_any_number_of_rows(scheme, dtype):
    (layer,) = quantised(scheme, dtype)
    for shape in [(512,), (2, 3, 512), (16, 512), (45, 512), (200, 512)]:
        x = torch.randn(shape, device="cuda", dtype=dtype)
        assert error(layer, x) < LIMIT[dtype], (shape, layer.candidates(dtype))
        assert torch.equal(layer(x), layer(x)), shape  # the same bits each time


def test_offsets_and_an_order():
    codes = torch.randint(-8, 8, (384, 512), dtype=torch.int8)
    sides = (torch.rand(384, 8).half(), torch.randn(384, 8))
    weight = QuantizedWeight.of(codes, sides[0], S4, 64, offsets=sides[1], order=torch.randperm(512))
    layer = tilewright.Linear(weight).cuda()
    for rows in (1, 20, 20, 20):
        assert error(layer, torch.randn(rows, 512, device="cuda", dtype=torch.float16)) < 4e-4
    fast = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(5, 512, device="cuda", dtype=torch.float16)
        assert torch.equal(fast(x).clone(), layer(x))


def test_activations_in_8_bits():
    (layer,) = quantised("a8w4g64", torch.bfloat16)
    assert error(layer, torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)) < 2e-2


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_by_torch(mode):
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)).half()
    tilewright.quantize_(model, "w4g64")
    model.requires_grad_(False).cuda()
    fast = torch.compile(model, fullgraph=True, mode=mode)
    for rows in (16, 16, 16, 4):
        x = torch.randn(rows, 256, device="cuda", dtype=torch.float16)
        torch.testing.assert_close(fast(x).clone(), model(x), rtol=2e-2, atol=2e-2)


def test_torch_takes_the_operation():
    (layer,) = quantised("w4g64z", torch.float16)
    x = torch.randn(2, 3, 512, device="cuda", dtype=torch.float16, requires_grad=True)
    parts = layer.packed, layer.scales, layer.zero_points, layer.offsets, layer.order, layer.factor, layer.bias
    opcheck(torch.ops.tilewright.linear.default, (x, *parts, layer.code_type, layer.group_size, layer.divides, False))


def test_a_captured_graph_computes_from_new_inputs():
    (layer,) = quantised("w4g64", torch.float16)
    x = torch.randn(16, 512, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(InputError, match="no kernel is ready for 16 rows"), torch.cuda.graph(graph):
        layer(x)
    layer.prepare([4, 16])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for _ in range(3):
        x.normal_()
        expected = layer(x)
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)


def test_the_host_never_waits():
    (layer,) = quantised("w4g64z", torch.bfloat16)
    xs = [torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16) for rows in (1, 5, 16, 33)]
    for x in xs:
        layer(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in xs:
            layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_of_several_rows_share_one_packing():
    """Half a byte a weight for the module, as much for its kernels, and the scales: no codes one a byte, no copy a kernel."""
    quantised("w4g64", torch.float16)[0].prepare(1)  # what a process has once, such as keys of hashes (8 MB)
    torch.cuda.synchronize()
    plain = torch.nn.Linear(4096, 2048, bias=False, device="cuda", dtype=torch.float16)
    before = torch.cuda.memory_allocated() - plain.weight.nbytes
    layer = tilewright.Linear.from_float(plain)
    del plain
    layer.prepare([1, 16, 3])
    if set(layer.candidates(torch.float16).values()) != {"hopper_w4"}:
        pytest.skip("other kernels serve here")
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated() - before) / (4096 * 2048) < 1.2


def test_other_streams():
    (layer,) = quantised("w4g64", torch.float16)
    layer.prepare(8)
    x = torch.randn(8, 512, device="cuda", dtype=torch.float16)
    expected = layer(x)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(layer(x))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in found)


@pytest.mark.parametrize("tiles", [2, 4, 8])
def test_torch_s_own_layout(tiles):
    codes = torch.randint(0, 16, (64, 256), device="cuda", dtype=torch.int32)
    halves = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(halves, tiles)
    sides = torch.randn(4, 64, 2, device="cuda").bfloat16()
    read = from_torch_int4(packed, sides)
    assert torch.equal(read.codes.int() + 8, codes)
    x = torch.randn(3, 256, device="cuda").bfloat16()
    theirs = torch.ops.aten._weight_int4pack_mm(x, packed, 64, sides)
    ours = tilewright.Linear(read)(x)
    assert float((ours - theirs).float().norm() / theirs.float().norm()) < 1e-2
