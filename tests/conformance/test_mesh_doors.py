"""`tilewright.compile(…, mesh=…, plan=…)` in two processes over gloo: plans of torch and shardings of StableHLO."""

from __future__ import annotations

import pytest
from two_ranks import two_ranks

pytestmark = pytest.mark.conformance
SHARDED = """
module {
  sdy.mesh @mesh = <["tp"=2]>
  func.func @main(%x: tensor<64x128xf32>, %w: tensor<128x256xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"tp"}]>},
      %v: tensor<256x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"tp"}, {}]>})
      -> (tensor<64x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
    %h = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<64x128xf32>, tensor<128x256xf32>) -> tensor<64x256xf32>
    %t = stablehlo.tanh %h : tensor<64x256xf32>
    %p = stablehlo.dot_general %t, %v, contracting_dims = [1] x [0]
        : (tensor<64x256xf32>, tensor<256x128xf32>) -> tensor<64x128xf32>
    return %p : tensor<64x128xf32>
  }
}
"""


def test_programs_of_both_readers_run_on_their_ranks() -> None:
    said = two_ranks(f"""
        import tilewright
        module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).eval()
        x = torch.randn(8, 64)
        with torch.no_grad():
            plan = {{"0": "colwise", "2": "rowwise"}}
            program = tilewright.compile(module, mesh=mesh, plan=plan, example_inputs=(x,), budget_s=0)
            torch.testing.assert_close(program(x), module(x), rtol=1e-4, atol=1e-5)
            x, w, v = torch.randn(64, 128), torch.randn(128, 256) / 10, torch.randn(256, 128) / 10
            program = tilewright.compile({SHARDED!r}, mesh=mesh, budget_s=0)
            y = program(x, program.part("w", w), program.part("v", v))
            torch.testing.assert_close(y, torch.tanh(x @ w) @ v, rtol=1e-4, atol=1e-4)
            print(len(program.steps), *map(str, program.placements.values()))
        dist.destroy_process_group()
    """)
    assert said.split("\n")[0].endswith("[, ] [, tp] [tp, ] [, ]"), said
