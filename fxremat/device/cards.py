"""Cards: what is known of common GPUs without having one.

Figures are those of the vendor's data sheets: peaks, which no program reaches. ``Card.rates`` are half of
them, as in the table of ``rates.py``. Products in half precision are those of the tensor cores without
sparsity, accumulated in float32; those in float32 are the CUDA cores', since torch does not use TF32 unless
it is told to. A GB is 10**9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxremat._torch.fake_cuda import Properties
from fxremat.device.rates import CUDA, Rates

__all__ = ["CARDS", "Card"]

_REACHED = 0.5  # part of a data sheet's peak

# Threads that a multiprocessor holds at once, by compute capability: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
_THREADS = {(7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 9): 1536, (9, 0): 2048}


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU by its data sheet.

    Attributes:
        name: What it is called.
        capability: Its compute capability.
        multiprocessors: How many it has.
        memory_bytes: Its memory.
        bytes_per_second: That its memory reads and writes.
        flops_per_second: Of products in float32.
        half_flops_per_second: Of products in bfloat16, in float16 where the card has no bfloat16.
        double_flops_per_second: Of products in float64.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float
    half_flops_per_second: float
    double_flops_per_second: float

    @property
    def rates(self) -> Rates:
        """What a program may reach."""
        return Rates(
            _REACHED * self.flops_per_second,
            _REACHED * self.half_flops_per_second,
            _REACHED * self.double_flops_per_second,
            _REACHED * self.bytes_per_second,
            CUDA.launch_seconds,
        )

    @property
    def properties(self) -> Properties:
        """What Inductor asks of it."""
        threads = _THREADS[self.capability]
        return Properties(self.name, *self.capability, self.multiprocessors, self.memory_bytes, threads)


_GB = 10**9

CARDS = {
    # NVIDIA H200 Tensor Core GPU, data sheet (SXM)
    "h200": Card("NVIDIA H200", (9, 0), 132, 141 * _GB, 4.8e12, 67e12, 989e12, 67e12),
    # NVIDIA H100 Tensor Core GPU, data sheet (SXM)
    "h100": Card("NVIDIA H100", (9, 0), 132, 80 * _GB, 3.35e12, 67e12, 989e12, 67e12),
    # NVIDIA A100 Tensor Core GPU, data sheet (SXM, 80 GB and 40 GB)
    "a100-80gb": Card("NVIDIA A100 80GB", (8, 0), 108, 80 * _GB, 2039e9, 19.5e12, 312e12, 19.5e12),
    "a100-40gb": Card("NVIDIA A100 40GB", (8, 0), 108, 40 * _GB, 1555e9, 19.5e12, 312e12, 19.5e12),
    # NVIDIA L40S, data sheet; float64, here and on L4: 1/64 of float32, Ada GPU Architecture white paper
    "l40s": Card("NVIDIA L40S", (8, 9), 142, 48 * _GB, 864e9, 91.6e12, 362e12, 91.6e12 / 64),
    # NVIDIA L4, data sheet, whose 242 TFLOPS in half precision are with sparsity
    "l4": Card("NVIDIA L4", (8, 9), 58, 24 * _GB, 300e9, 30.3e12, 121e12, 30.3e12 / 64),
    # Ada GPU Architecture white paper, GeForce RTX 4090
    "rtx4090": Card(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 24 * _GB, 1008e9, 82.6e12, 165.2e12, 82.6e12 / 64
    ),
    # NVIDIA V100 Tensor Core GPU, data sheet (SXM2, 32 GB and 16 GB)
    "v100-32gb": Card("NVIDIA V100 32GB", (7, 0), 80, 32 * _GB, 900e9, 15.7e12, 125e12, 7.8e12),
    "v100-16gb": Card("NVIDIA V100 16GB", (7, 0), 80, 16 * _GB, 900e9, 15.7e12, 125e12, 7.8e12),
    # NVIDIA T4, data sheet; float64 at 1/32 of float32: Turing GPU Architecture white paper
    "t4": Card("NVIDIA T4", (7, 5), 40, 16 * _GB, 300e9, 8.1e12, 65e12, 8.1e12 / 32),
}
