"""Times of Hopper's warpgroup products whose left operand is in registers or in shared memory, alone and beside the work of
making halves of 4-bit codes: the ceiling of kernels for few rows by 4-bit weights.

    python benchmarks/wgmma_rate.py [--nvcc nvcc]

Four products m64nNk16 of f16, 64 columns along K, are asked for together; a scheduler's tile is 16 rows of those. "made" has
the 56 instructions between that make the next four left operands of four words a thread (`w4/convert.py`). Every SM runs one
block; the cycles are means over blocks of 512 rounds, by each block's own clock. Needs a Hopper GPU and CUDA's compiler.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

COLUMNS = (8, 16, 32, 64, 128, 256)
MADE = (32, 64, 128)
GROUPS = (1, 2, 4)
ROUNDS = 512
SHARED = 98304

CONVERT = """
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t w = words[i], u = __funnelshift_r(w, w, 8), t[4];
      asm volatile("lop3.b32 %0, %1, 0x03c003c0, 0x4c004c00, 0xea;" : "=r"(t[0]) : "r"(w));
      asm volatile("lop3.b32 %0, %1, 0x003c003c, 0x5c005c00, 0xea;" : "=r"(t[1]) : "r"(w));
      asm volatile("lop3.b32 %0, %1, 0x03c003c0, 0x4c004c00, 0xea;" : "=r"(t[2]) : "r"(u));
      asm volatile("lop3.b32 %0, %1, 0x003c003c, 0x5c005c00, 0xea;" : "=r"(t[3]) : "r"(u));
      for (int j = 0; j < 4; j++) {
        asm volatile("sub.rn.f16x2 %0, %0, %1;" : "+r"(t[j]) : "r"(j % 2 ? 0x5c205c20 : 0x4e004e00));
        asm volatile("mul.rn.f16x2 %0, %0, %1;" : "+r"(t[j]) : "r"(scale));
        next[4 * i + j] = t[j];
      }
      words[i] += round;
    }"""


def product(columns: int, registers: bool, step: int) -> str:
    """One product of a step along K."""
    sums = columns // 2
    d = ", ".join(f"%{i}" for i in range(sums))
    out = ", ".join(f'"+f"(sum[{i}])' for i in range(sums))
    if registers:
        a = "{" + ", ".join(f"%{sums + i}" for i in range(4)) + "}"
        given = ", ".join(f'"r"(now[{4 * step + i}])' for i in range(4)) + f', "l"(right + {2 * step})'
        operands = f"{a}, %{sums + 4}, 1, 1, 1, 0"
    else:
        given = f'"l"(left + {2 * step}), "l"(right + {2 * step})'
        operands = f"%{sums}, %{sums + 1}, 1, 1, 1, 0, 0"
    return f'asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{d}}}, {operands};" : {out} : {given});'


def kernel(name: str, columns: int, registers: bool, made: bool) -> str:
    """A kernel that asks for products again and again."""
    products = "\n    ".join(product(columns, registers, step) for step in range(4))
    return f"""
__global__ void __launch_bounds__({256 if columns == 256 else 512}) {name}(float *out, long long *cycles, uint32_t scale) {{
  extern __shared__ __align__(1024) char room[];
  uint32_t base = (uint32_t)__cvta_generic_to_shared(room);
  for (int i = threadIdx.x; i < {SHARED // 4}; i += blockDim.x) ((uint32_t *)room)[i] = (i * 2654435761u) & 0x3bff3bffu;
  uint64_t high = (uint64_t)(1u << 30 | 64u) << 32, right = high | (base >> 4);
  uint64_t left = high | ((base + 32768 + threadIdx.x / 128 * 8192) >> 4);
  float sum[{columns // 2}] = {{}};
  uint32_t now[16], next[16], words[4];
  for (int i = 0; i < 16; i++) now[i] = next[i] = ((threadIdx.x * 77 + i) * 2654435761u) & 0x3bff3bffu;
  for (int i = 0; i < 4; i++) words[i] = now[i] * scale;
  __syncthreads();
  long long began = clock64();
#pragma unroll 2
  for (int round = 0; round < {ROUNDS}; round++) {{
    asm volatile("wgmma.fence.sync.aligned;");
    {products}
    asm volatile("wgmma.commit_group.sync.aligned;");
    {CONVERT if made else ""}
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    {"for (int i = 0; i < 16; i++) now[i] = next[i];" if made else ""}
  }}
  long long took = clock64() - began;
  float all = next[3] + (float)left;
  for (int i = 0; i < {columns // 2}; i++) all += sum[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = all;
  if (threadIdx.x == 0) cycles[blockIdx.x] = took;
}}"""


def program() -> str:
    """All kernels, and what times them."""
    forms = [(n, r, m) for r in (True, False) for n in COLUMNS for m in (False, True) if not m or (r and n in MADE)]
    kernels, calls = list[str](), list[str]()
    for i, (columns, registers, made) in enumerate(forms):
        kernels.append(kernel(f"form{i}", columns, registers, made))
        where = f"{'registers' if registers else 'shared memory'}{', made' if made else ''}"
        calls += [f'timed(form{i}, {g}, "{where}", {columns}, out, cycles);' for g in GROUPS if not (columns == 256 and g == 4)]
    lines = "\n  ".join(calls)
    return f"""#include <cstdint>
#include <cstdio>
#include <cstdlib>
{"".join(kernels)}
template <class F> void timed(F form, int groups, const char *where, int columns, float *out, long long *cycles) {{
  static long long each[1024];
  int blocks;
  cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0);
  cudaFuncSetAttribute(form, cudaFuncAttributeMaxDynamicSharedMemorySize, {SHARED});
  for (int i = 0; i < 2; i++) form<<<blocks, 128 * groups, {SHARED}>>>(out, cycles, 0x2c002c00u);
  cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {{ fprintf(stderr, "%s\\n", cudaGetErrorString(error)); exit(1); }}
  cudaMemcpy(each, cycles, blocks * sizeof(long long), cudaMemcpyDeviceToHost);
  double sum = 0;
  for (int i = 0; i < blocks; i++) sum += each[i];
  printf("%3d columns, left operand in %-18s %d warpgroups: %6.1f cycles a tile of a scheduler, at full rate %d\\n", columns,
         where, groups, sum / blocks / {ROUNDS} / groups, 2 * columns);
}}
int main() {{
  float *out;
  long long *cycles;
  cudaMalloc(&out, 4 << 20);
  cudaMalloc(&cycles, 8192);
  {lines}
}}
"""


@click.command()
@click.option("--nvcc", default="nvcc", show_default=True, help="CUDA's compiler.")
@click.option("--build", "only_build", is_flag=True, help="Compile, and run nothing.")
def main(nvcc: str, only_build: bool) -> None:
    """Time warpgroup products."""
    if shutil.which(nvcc) is None:
        raise click.BadParameter(f"no such compiler: {nvcc}", param_hint="--nvcc")
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "rate.cu", Path(folder) / "rate"
        source.write_text(program(), encoding="utf-8")
        subprocess.run([nvcc, "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-o", binary, source], check=True)
        if not only_build:
            sys.exit(subprocess.run([binary], check=False).returncode)


if __name__ == "__main__":
    main()
