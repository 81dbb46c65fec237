"""Modules whose weights lie on the device, compiled without saying where."""

import pytest
import torch

import tilewright

pytestmark = pytest.mark.gpu


class Biased(torch.nn.Module):
    """Attention with a bias by relative position that a table on the device gives, as T5 has it."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)
        self.q, self.k, self.v = (torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        b, n, _ = x.shape
        at = torch.arange(n, device=x.device)
        bias = self.table((at[None] - at[:, None]).clamp(-4, 3) + 4).permute(2, 0, 1)[None]
        bias = bias.masked_fill(at[None] > at[:, None], torch.finfo(x.dtype).min)
        q, k, v = (t(x).view(b, n, 4, 16).transpose(1, 2) for t in (self.q, self.k, self.v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(b, n, 64)


def test_it_runs_where_its_weights_are():
    torch.manual_seed(0)
    module, x = Biased().eval().cuda(), torch.randn(2, 7, 64, device="cuda")
    program = tilewright.compile(module, example_inputs=(x,), budget_s=0, cache=False)
    got = program(x)
    assert got.device == x.device
    with torch.no_grad():
        torch.testing.assert_close(got, module(x), rtol=1e-3, atol=1e-4)


@torch.library.custom_op("tilewright_gpu_test::where_it_is", mutates_args=())
def where_it_is(x: torch.Tensor) -> torch.Tensor:
    """1 where the operand lies on a GPU."""
    return torch.full_like(x, float(x.is_cuda))


@where_it_is.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_of_torch_runs_where_the_program_does():
    class Asked(torch.nn.Module):
        def forward(self, x):
            return where_it_is(x * 2) + torch.histc((x > 0).int(), 2, 0, 1).sum()

    module, x = Asked(), torch.randn(4, 16, device="cuda")
    program = tilewright.compile(module, example_inputs=(x,), budget_s=0, cache=False)
    assert torch.equal(program(x), torch.full_like(x, 65.0))
