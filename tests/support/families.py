"""Operators by family, as large cases: what torch's database of operators has only small, or not at all.

Families are pointwise operators, complex numbers, special functions, copies and writes to views, indexing,
reductions, sorting, Fourier transforms, poolings, convolutions of 1 to 64 channels, normalisations, losses
and linear algebra. The operands are drawn and need gradients; the first has 64 KiB at least, mostly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from operators import Case, made
from torch import Tensor
from torch.nn import functional as F

Shape = tuple[int, ...]

# How operands lie in memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "swapped": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
}


def family(name: str, layout: str = "dense") -> Case:
    """The case of that name, its operands laid out in that way."""
    call, *shapes = FAMILIES[name]
    torch.manual_seed(0)
    operands = [LAYOUTS[layout](torch.randn(shape)).requires_grad_() for shape in shapes]
    return made(f"{name} {layout}", call, *operands)


def rows() -> Tensor:
    """Every third index below 512."""
    return torch.arange(0, 512, 3)


def index(below: int, *shape: int) -> Tensor:
    """Indices in no order."""
    return (torch.arange(math.prod(shape)) * 7919 % below).view(shape)


def assigned(place: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Writes the second operand to a place in a copy of the first."""

    def assign(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        x[place] = y
        return x

    return assign


def added(x: Tensor) -> Tensor:
    """Adds in place to every other column."""
    y = x.clone()
    y[:, ::2] += 1.5
    return y


FAMILIES: dict[str, tuple[Any, ...]] = {
    # copying
    "roll 1": (lambda x: x.roll(5, 0), (256, 256)),
    "roll 2": (lambda x: x.roll((5, 7), (0, 1)), (256, 256)),
    "roll flat": (lambda x: x.roll(5), (256, 256)),
    "select_scatter": (lambda x, y: torch.select_scatter(x, y, 1, 3), (512, 256), (512,)),
    "slice_scatter": (lambda x, y: torch.slice_scatter(x, y, 1, 3, 103), (512, 256), (512, 100)),
    "diagonal_scatter": (lambda x, y: torch.diagonal_scatter(x, y), (256, 256), (256,)),
    "as_strided_scatter": (
        lambda x, y: torch.as_strided_scatter(x, y, (64, 64), (64, 1)),
        (256, 256),
        (64, 64),
    ),
    "assign a row": (assigned(3), (256, 512), (512,)),
    "assign rows": (assigned(slice(10, 20)), (256, 512), (10, 512)),
    "assign a column": (assigned((slice(None), 3)), (256, 512), (256,)),
    "assign columns": (assigned((slice(None), slice(10, 200))), (256, 512), (256, 190)),
    "select_scatter of rows": (lambda x, y: torch.select_scatter(x[10:30], y, 0, 3), (256, 512), (512,)),
    "slice_scatter of rows": (lambda x, y: torch.slice_scatter(x[10:30], y, 0, 3, 8), (256, 512), (5, 512)),
    "diagonal_scatter of rows": (lambda x, y: torch.diagonal_scatter(x[10:30], y), (256, 512), (20,)),
    "add on a view": (added, (256, 512)),
    "fill on a view": (lambda x: F.relu(x).index_fill(1, rows()[:50], 0.5), (256, 512)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.3), (256, 512)),
    "masked_select where": (lambda x, y: torch.where(x > 0, x, y), (256, 512), (256, 512)),
    "masked_scatter": (lambda x, y: x.masked_scatter(x > 0, y), (256, 256), (256, 256)),
    "index rows": (lambda x: x[rows()], (512, 256)),
    "index columns": (lambda x: x[:, rows()], (256, 512)),
    "index pairs": (lambda x: x[rows()[:, None], rows()[None, :]], (512, 512)),
    "index apart": (lambda x: x[rows(), :, rows()], (512, 8, 512)),
    "index_select": (lambda x: x.index_select(1, rows()), (256, 512)),
    "index_add": (lambda x, y: x.index_add(0, rows(), y), (512, 256), (171, 256)),
    "index_copy": (lambda x, y: x.index_copy(1, rows(), y), (256, 512), (256, 171)),
    "index_put": (lambda x, y: x.index_put((rows(),), y), (512, 256), (171, 256)),
    "index_put accumulate": (lambda x, y: x.index_put((rows(),), y, accumulate=True), (512, 256), (171, 256)),
    "index_reduce": (lambda x, y: x.index_reduce(0, rows(), y, "mean"), (512, 256), (171, 256)),
    "put": (lambda x, y: x.put(rows(), y), (512, 256), (171,)),
    "take": (lambda x: x.take(index(512 * 256, 300, 300)), (512, 256)),
    "gather": (lambda x: x.gather(1, index(256, 512, 300)), (512, 256)),
    "scatter": (lambda x, y: x.scatter(1, index(256, 512, 200), y), (512, 256), (512, 200)),
    "scatter_add": (lambda x, y: x.scatter_add(1, index(256, 512, 200), y), (512, 256), (512, 200)),
    "scatter_reduce": (
        lambda x, y: x.scatter_reduce(1, index(256, 512, 200), y, "prod"),
        (512, 256),
        (512, 200),
    ),
    "scatter_reduce amax": (
        lambda x, y: x.scatter_reduce(1, index(256, 512, 200), y, "amax"),
        (512, 256),
        (512, 200),
    ),
    "take_along_dim": (lambda x: x.take_along_dim(x.argsort(1), 1), (512, 256)),
    "cat": (lambda x, y: torch.cat([x, y, x], 1), (256, 256), (256, 100)),
    "cat of slices": (lambda x: torch.cat([x[:, :100], x[:, 50:]], 1), (256, 256)),
    "cat empty": (lambda x: torch.cat([x, x[:0]]), (256, 256)),
    "stack": (lambda x, y: torch.stack([x, y], 2), (256, 256), (256, 256)),
    "tile": (lambda x: x.tile(2, 3), (128, 256)),
    "repeat": (lambda x: x.repeat(2, 3), (128, 256)),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 1), (128, 256)),
    "flip": (lambda x: x.flip(0, 1), (256, 256)),
    "rot90": (lambda x: x.rot90(1, (0, 1)), (256, 256)),
    "tril": (lambda x: x.tril(), (2, 256, 256)),
    "triu sliced": (lambda x: x[:, ::2].triu(), (256, 512)),
    "pad": (lambda x: F.pad(x, (3, 4, 5, 6)), (2, 256, 256)),
    "pad crop": (lambda x: F.pad(x, (-3, -4, -5, 6)), (2, 256, 256)),
    "pad reflect": (lambda x: F.pad(x, (3, 4, 5, 6), "reflect"), (2, 3, 128, 128)),
    "pad circular": (lambda x: F.pad(x, (3, 4, 5, 6), "circular"), (2, 3, 128, 128)),
    "unfold": (lambda x: x.unfold(1, 7, 3), (256, 256)),
    "im2col": (lambda x: F.unfold(x, 3), (2, 4, 64, 64)),
    "col2im": (lambda x: F.fold(x, (64, 64), 3), (2, 36, 62 * 62)),
    "kron": (lambda x, y: torch.kron(x, y), (16, 16), (16, 16)),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y, indexing="ij"), (256,), (256,)),
    "block_diag": (lambda x, y: torch.block_diag(x, y), (128, 128), (128, 128)),
    "diag_embed": (lambda x: torch.diag_embed(x), (8, 128)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 4), (2, 16, 64, 64)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (2, 16, 64, 64)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (2, 16, 64, 64)),
    "embedding": (lambda w: F.embedding(index(1000, 64, 32), w), (1000, 64)),
    "embedding_bag": (lambda w: F.embedding_bag(index(1000, 64, 32), w, mode="sum"), (1000, 64)),
    "embedding_bag max": (lambda w: F.embedding_bag(index(1000, 64, 32), w, mode="max"), (1000, 64)),
    "one_hot": (lambda x: x * F.one_hot(index(256, 256), 256), (256, 256)),
    # pointwise
    "type float64": (lambda x: x.double().sin(), (256, 256)),
    "type bfloat16": (lambda x: F.gelu(x.bfloat16()), (256, 256)),
    "mixed add": (lambda x, y: x.bfloat16() + y, (256, 256), (256, 256)),
    "mixed mul": (lambda x, y: x.double() * y, (256, 256), (256,)),
    "int times": (lambda x: x * torch.arange(256), (256, 256)),
    "bool times": (lambda x: x * (x > 0), (256, 256)),
    "power": (lambda x: x.abs() ** 2.5, (256, 256)),
    "broadcast": (lambda x, y: x * y, (256, 1, 64), (1, 64, 1)),
    "complex abs": (lambda x: torch.complex(x, x).abs(), (256, 256)),
    "complex angle": (lambda x: torch.complex(x, x + 1).angle(), (256, 256)),
    "polar": (lambda x: torch.polar(x.exp(), x), (256, 256)),
    "complex exp": (lambda x: torch.complex(x, x).exp(), (256, 256)),
    "complex conj mul": (lambda x: torch.complex(x, x) * torch.complex(x, x + 1).conj(), (256, 256)),
    "complex matmul": (lambda x: torch.complex(x, x) @ torch.complex(x, x + 1).mH, (256, 256)),
    "mvlgamma": (lambda x: torch.mvlgamma(x.abs() + 5, 3), (256, 256)),
    "polygamma": (lambda x: torch.polygamma(2, x.abs() + 1), (256, 256)),
    "digamma lgamma": (lambda x: torch.lgamma(x.abs() + 1), (256, 256)),
    "erfinv": (lambda x: torch.erfinv(x.tanh()), (256, 256)),
    "i1e": (lambda x: torch.special.i1e(x), (256, 256)),
    "ndtri": (lambda x: torch.special.ndtri(x.sigmoid()), (256, 256)),
    "log_ndtr": (lambda x: torch.special.log_ndtr(x), (256, 256)),
    "xlogy": (lambda x, y: torch.xlogy(x, y.exp()), (256, 256), (256, 256)),
    "isin": (lambda x: x * torch.isin(x, x[0]), (256, 256)),
    "isin int": (lambda x: x * torch.isin(index(256, 256, 256), index(256, 30)), (256, 256)),
    "bucketize": (lambda x: x * torch.bucketize(x, torch.linspace(-1, 1, 20)), (256, 256)),
    "searchsorted": (lambda x: x * torch.searchsorted(x.sort(1)[0], x), (256, 256)),
    "isclose": (lambda x: x * torch.isclose(x, x.exp()), (256, 256)),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), (256, 256), (256, 256)),
    "addcdiv": (lambda x, y: torch.addcdiv(x, y, y.exp()), (256, 256), (256, 256)),
    "clamp": (lambda x, y: x.clamp(y - 1, y + 1), (256, 256), (256, 256)),
    "ldexp": (lambda x, y: torch.ldexp(x, y), (256, 256), (256, 256)),
    "frexp": (lambda x: torch.frexp(x), (256, 256)),
    "logit": (lambda x: torch.logit(x.sigmoid()), (256, 256)),
    "hypot": (lambda x, y: torch.hypot(x, y), (256, 256), (256, 256)),
    "glu": (lambda x: F.glu(x), (256, 256)),
    "prelu": (lambda x, w: F.prelu(x, w), (16, 16, 256), (16,)),
    "rrelu": (lambda x: F.rrelu(x), (256, 256)),
    "softplus": (lambda x: F.softplus(x), (256, 256)),
    "logsigmoid": (lambda x: F.logsigmoid(x), (256, 256)),
    "mish": (lambda x: F.mish(x), (256, 256)),
    "nan_to_num": (lambda x: x.nan_to_num(), (256, 256)),
    "float_power": (lambda x: x.abs().float_power(2.5), (256, 256)),
    # reductions
    "sum inner": (lambda x: x.sum(1), (256, 512)),
    "sum outer": (lambda x: x.sum(0), (256, 512)),
    "sum bfloat16": (lambda x: x.bfloat16().sum(0), (256, 512)),
    "sum to float64": (lambda x: x.sum(0, dtype=torch.float64), (256, 512)),
    "mean": (lambda x: x.mean((0, 2)), (16, 64, 128)),
    "var": (lambda x: x.var(1), (256, 512)),
    "std all": (lambda x: x.std(), (256, 512)),
    "var_mean": (lambda x: torch.var_mean(x, (0, 2)), (16, 64, 128)),
    "norm": (lambda x: x.norm(dim=0), (256, 512)),
    "norm 1": (lambda x: torch.linalg.vector_norm(x, 1.5, 1), (256, 512)),
    "nuc norm": (lambda x: torch.linalg.matrix_norm(x, "nuc"), (8, 64, 64)),
    "logsumexp": (lambda x: x.logsumexp(1), (256, 512)),
    "prod": (lambda x: x.prod(1), (256, 512)),
    "prod outer": (lambda x: x.prod(0), (256, 512)),
    "amax": (lambda x: x.amax(0), (256, 512)),
    "max dim": (lambda x: x.max(0)[0], (256, 512)),
    "aminmax": (lambda x: torch.aminmax(x, dim=1), (256, 512)),
    "cumsum": (lambda x: x.cumsum(0), (256, 512)),
    "cumprod": (lambda x: x.cumprod(0), (256, 512)),
    "cummax": (lambda x: x.cummax(0)[0], (256, 512)),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), (256, 512)),
    "trapezoid": (lambda x: torch.cumulative_trapezoid(x), (256, 512)),
    "median": (lambda x: x.median(0)[0], (256, 512)),
    "nanmedian": (lambda x: x.nanmedian(1)[0], (256, 512)),
    "mode": (lambda x: x.mode(1)[0], (64, 512)),
    "quantile": (lambda x: x.quantile(torch.tensor([0.2, 0.7]), 0), (256, 512)),
    "nanquantile": (lambda x: x.nanquantile(0.3, 1), (256, 512)),
    "sort": (lambda x: x.sort(0)[0], (256, 512)),
    "sort stable": (lambda x: x.sort(dim=1, stable=True, descending=True)[0], (256, 512)),
    "argsort": (lambda x: x * x.argsort(0), (256, 512)),
    "topk": (lambda x: x.topk(100, 0)[0], (256, 512)),
    "topk half": (lambda x: x.topk(400, 1)[0], (256, 512)),
    "kthvalue": (lambda x: x.kthvalue(3, 0)[0], (256, 512)),
    "histc": (lambda x: x * x.detach().histc(10).sum(), (256, 512)),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), (256, 512)),
    "softmax": (lambda x: x.softmax(0), (256, 512)),
    "log_softmax": (lambda x: x.log_softmax(1), (256, 512)),
    "softmin bf16": (lambda x: x.bfloat16().softmax(1), (256, 512)),
    "softmax to f64": (lambda x: x.softmax(1, dtype=torch.float64), (256, 512)),
    "diff": (lambda x: x.diff(n=2, dim=0), (256, 512)),
    # fft
    "fft": (lambda x: torch.fft.fft(x), (256, 512)),
    "rfft": (lambda x: torch.fft.rfft(x), (256, 512)),
    "rfft abs": (lambda x: torch.fft.rfft(x).abs(), (256, 512)),
    "irfft": (lambda x: torch.fft.irfft(torch.complex(x, x)), (256, 512)),
    "fft2": (lambda x: torch.fft.fft2(x), (256, 512)),
    "fft outer": (lambda x: torch.fft.fft(x, dim=0), (256, 512)),
    "rfft2": (lambda x: torch.fft.rfft2(x), (256, 512)),
    "irfft2": (lambda x: torch.fft.irfft2(torch.complex(x, x)), (256, 512)),
    "irfft odd": (lambda x: torch.fft.irfft(torch.complex(x, x), n=501, dim=0), (256, 256)),
    "hfft": (lambda x: torch.fft.hfft(torch.complex(x, x)), (256, 256)),
    "ihfft": (lambda x: torch.fft.ihfft(x), (256, 512)),
    "fft padded": (lambda x: torch.fft.fft(x, n=700), (256, 512)),
    "fftshift": (lambda x: torch.fft.fftshift(x), (256, 512)),
    "stft": (lambda x: torch.stft(x, 128, window=torch.hann_window(128), return_complex=True), (4, 8000)),
    "istft": (lambda x: torch.istft(torch.complex(x, x), 128, window=torch.hann_window(128)), (4, 65, 200)),
    # pooling, convolutions
    "max_pool1d": (lambda x: F.max_pool1d(x, 3), (4, 16, 1024)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 16, 64, 64)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (2, 4, 16, 32, 32)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3), (4, 16, 1024)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), (2, 16, 64, 64)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (2, 4, 16, 32, 32)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 5), (2, 16, 64, 64)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 5), (2, 4, 16, 32, 32)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 5), (2, 16, 64, 64)),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(x, 5), (2, 16, 4096)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 5), (2, 4, 16, 32, 32)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x.exp(), 2.0, 3), (2, 16, 64, 64)),
    "fractional_max_pool2d": (lambda x: F.fractional_max_pool2d(x, 3, (20, 20)), (2, 16, 64, 64)),
    "max_unpool2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (2, 16, 64, 64)),
    "interpolate nearest": (lambda x: F.interpolate(x, scale_factor=2), (2, 16, 32, 32)),
    "interpolate bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (2, 16, 32, 32)),
    "interpolate bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (2, 16, 32, 32)),
    "interpolate antialias": (
        lambda x: F.interpolate(x, size=(20, 20), mode="bilinear", antialias=True),
        (2, 16, 64, 64),
    ),
    "interpolate trilinear": (
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        (2, 4, 8, 16, 16),
    ),
    "interpolate area": (lambda x: F.interpolate(x, size=20, mode="area"), (2, 16, 64, 64)),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3), (2, 16, 64, 64)),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        (2, 8, 64, 64),
        (2, 50, 50, 2),
    ),
    "affine_grid": (lambda t: F.affine_grid(t, [4, 3, 64, 64], align_corners=False), (4, 2, 3)),
    **{
        f"conv1d {i}-{o}": (lambda x, w: F.conv1d(x, w, padding=2), (4, i, 1024), (o, i, 5))
        for i, o in [(1, 1), (1, 16), (16, 64), (64, 1)]
    },
    **{
        f"conv2d {i}-{o}": (lambda x, w: F.conv2d(x, w, padding=1), (2, i, 64, 64), (o, i, 3, 3))
        for i, o in [(1, 1), (1, 8), (3, 16), (5, 7), (16, 16), (33, 64), (64, 64), (64, 1)]
    },
    "conv2d 1x1": (lambda x, w: F.conv2d(x, w), (2, 32, 32, 32), (64, 32, 1, 1)),
    "conv2d bias": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 8, 64, 64), (16, 8, 3, 3), (16,)),
    "conv2d stride": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (2, 16, 64, 64), (32, 16, 3, 3)),
    "conv2d dilated": (lambda x, w: F.conv2d(x, w, dilation=2), (2, 16, 64, 64), (16, 16, 3, 3)),
    "conv2d groups": (lambda x, w: F.conv2d(x, w, groups=4), (2, 16, 64, 64), (32, 4, 3, 3)),
    "conv2d depthwise": (lambda x, w: F.conv2d(x, w, groups=16), (2, 16, 64, 64), (16, 1, 3, 3)),
    "conv2d same even": (lambda x, w: F.conv2d(x, w, padding="same"), (2, 8, 64, 64), (8, 8, 4, 4)),
    "conv2d single": (lambda x, w: F.conv2d(x, w), (16, 64, 64), (16, 16, 3, 3)),
    "conv2d double": (lambda x, w: F.conv2d(x.double(), w.double()), (2, 8, 64, 64), (8, 8, 3, 3)),
    "conv2d bfloat16": (lambda x, w: F.conv2d(x.bfloat16(), w.bfloat16()), (2, 8, 64, 64), (8, 8, 3, 3)),
    "conv2d complex": (
        lambda x, w: F.conv2d(torch.complex(x, x), torch.complex(w, w)),
        (2, 8, 32, 32),
        (8, 8, 3, 3),
    ),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), (1, 4, 16, 32, 32), (8, 4, 3, 3, 3)),
    "conv3d single channel": (lambda x, w: F.conv3d(x, w, padding=1), (1, 1, 16, 32, 32), (8, 1, 3, 3, 3)),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x, w, stride=2), (2, 16, 1024), (16, 8, 4)),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (2, 16, 32, 32), (16, 8, 4, 4)),
    "conv_transpose3d": (lambda x, w: F.conv_transpose3d(x, w, stride=2), (1, 8, 8, 16, 16), (8, 4, 2, 2, 2)),
    # normalisations, attention
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (4, 16, 32, 32), (16,), (16,)),
    "batch_norm eval": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(16), torch.ones(16), w, b, False),
        (4, 16, 32, 32),
        (16,),
        (16,),
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (256,), w, b), (256, 256), (256,), (256,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (256,), w), (256, 256), (256,)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (4, 16, 32, 32), (16,), (16,)),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), (4, 16, 32, 32), (16,), (16,)),
    "normalize": (lambda x: F.normalize(x), (256, 256)),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), (256, 256), (256, 1)),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (2, 4, 64, 32),
        (2, 4, 64, 32),
        (2, 4, 64, 32),
    ),
    "attention causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (2, 4, 64, 32),
        (2, 4, 64, 32),
        (2, 4, 64, 32),
    ),
    "attention masked": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        (2, 4, 64, 32),
        (2, 4, 64, 32),
        (2, 4, 64, 32),
        (64, 64),
    ),
    "attention odd": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (2, 4, 61, 31),
        (2, 4, 67, 31),
        (2, 4, 67, 31),
    ),
    "bilinear": (lambda x, y, w: F.bilinear(x, y, w), (256, 64), (256, 32), (16, 64, 32)),
    # losses
    "cross_entropy": (lambda x: F.cross_entropy(x, index(256, 256)), (256, 256)),
    "cross_entropy smooth": (lambda x: F.cross_entropy(x, index(256, 256), label_smoothing=0.1), (256, 256)),
    "cross_entropy weights": (
        lambda x, w: F.cross_entropy(x, index(256, 256), w.exp().detach()),
        (256, 256),
        (256,),
    ),
    "cross_entropy probabilities": (lambda x, y: F.cross_entropy(x, y.softmax(1)), (256, 256), (256, 256)),
    "cross_entropy image": (lambda x: F.cross_entropy(x, index(10, 4, 64, 64)), (4, 10, 64, 64)),
    "nll none": (lambda x: F.nll_loss(x.log_softmax(1), index(256, 256), reduction="none"), (256, 256)),
    "kl_div": (
        lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        (256, 256),
        (256, 256),
    ),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), (256, 256), (256, 256)),
    "bce logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=torch.ones(256)),
        (256, 256),
        (256, 256),
    ),
    "mse": (lambda x, y: F.mse_loss(x, y), (256, 256), (256, 256)),
    "l1": (lambda x, y: F.l1_loss(x, y), (256, 256), (256, 256)),
    "smooth_l1": (lambda x, y: F.smooth_l1_loss(x, y), (256, 256), (256, 256)),
    "huber": (lambda x, y: F.huber_loss(x, y), (256, 256), (256, 256)),
    "gaussian_nll": (lambda x, y, v: F.gaussian_nll_loss(x, y, v.exp()), (256, 256), (256, 256), (256, 256)),
    "poisson_nll": (lambda x, y: F.poisson_nll_loss(x, y.exp(), full=True), (256, 256), (256, 256)),
    "soft_margin": (lambda x: F.soft_margin_loss(x, x.detach().sign()), (256, 256)),
    "multi_margin": (lambda x: F.multi_margin_loss(x, index(256, 256)), (256, 256)),
    "multilabel_margin": (lambda x: F.multilabel_margin_loss(x, index(256, 256, 256)), (256, 256)),
    "multilabel_soft": (lambda x: F.multilabel_soft_margin_loss(x, (x.detach() > 0).float()), (256, 256)),
    "margin_ranking": (
        lambda x, y: F.margin_ranking_loss(x, y, torch.ones(256, 256)),
        (256, 256),
        (256, 256),
    ),
    "cosine_embedding": (lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(256)), (256, 256), (256, 256)),
    "triplet": (lambda x, y, z: F.triplet_margin_loss(x, y, z), (256, 256), (256, 256), (256, 256)),
    "ctc": (
        lambda x: F.ctc_loss(
            x.log_softmax(2), index(19, 16, 10) + 1, torch.full((16,), 50), torch.full((16,), 10)
        ),
        (50, 16, 20),
    ),
    "cdist": (lambda x, y: torch.cdist(x, y), (128, 64), (128, 64)),
    "cdist 1": (lambda x, y: torch.cdist(x, y, p=1.0), (128, 64), (128, 64)),
    "pdist": (lambda x: F.pdist(x), (256, 64)),
    "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y), (256, 256), (256, 256)),
    # products and linalg
    "lu_solve batched": (
        lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), y),
        (64, 16, 16),
        (64, 16, 4),
    ),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w), (256,), (256, 128), (128, 256)),
    "mm transposed": (lambda x, w: x.t() @ w.t(), (128, 256), (256, 128)),
    "mm sliced": (lambda x, w: x[:, ::2] @ w[::2], (256, 256), (256, 256)),
    "bmm expanded": (lambda x, w: x @ w, (8, 64, 64), (64, 64)),
    "baddbmm": (lambda b, x, w: torch.baddbmm(b, x, w), (8, 1, 64), (8, 64, 64), (8, 64, 64)),
    "einsum": (lambda x, w: torch.einsum("bij,bkj->bik", x, w), (8, 64, 64), (8, 64, 64)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 2), (8, 64, 64), (64, 64, 8)),
    "addbmm": (lambda b, x, w: torch.addbmm(b, x, w), (64, 64), (8, 64, 64), (8, 64, 64)),
    "outer": (lambda x, w: torch.outer(x, w), (256,), (256,)),
    "addr": (lambda b, x, w: torch.addr(b, x, w), (256, 256), (256,), (256,)),
    "mv": (lambda x, w: x @ w, (256, 256), (256,)),
    "chain_matmul": (lambda x, y, z: torch.linalg.multi_dot([x, y, z]), (256, 64), (64, 128), (128, 256)),
    **{
        f"linalg {n}": (f, (8, 64, 64))
        for n, f in {
            "inv": lambda x: torch.linalg.inv(x),
            "det": lambda x: torch.linalg.det(x / 8),
            "slogdet": lambda x: torch.linalg.slogdet(x),
            "qr": lambda x: torch.linalg.qr(x),
            "svd": lambda x: torch.linalg.svd(x, full_matrices=False),
            "svdvals": lambda x: torch.linalg.svdvals(x),
            "eigh": lambda x: torch.linalg.eigh(x + x.mT),
            "eigvalsh": lambda x: torch.linalg.eigvalsh(x + x.mT),
            "eig": lambda x: torch.linalg.eig(x),
            "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 64 * torch.eye(64)),
            "matrix_exp": lambda x: torch.linalg.matrix_exp(x / 8),
            "pinv": lambda x: torch.linalg.pinv(x),
            "lu": lambda x: torch.linalg.lu(x),
            "lu_factor": lambda x: torch.linalg.lu_factor(x),
            "matrix_power": lambda x: torch.linalg.matrix_power(x / 8, 3),
            "cond": lambda x: torch.linalg.cond(x),
            "matrix_norm 2": lambda x: torch.linalg.matrix_norm(x, 2),
            "tri inverse": lambda x: torch.linalg.solve_triangular(
                x.triu() + 9 * torch.eye(64), torch.eye(64).expand(8, 64, 64), upper=True
            ),
        }.items()
    },
    "linalg solve": (lambda x, y: torch.linalg.solve(x, y), (8, 64, 64), (8, 64, 32)),
    "linalg lstsq": (lambda x, y: torch.linalg.lstsq(x, y)[0], (8, 64, 32), (8, 64, 4)),
    "cholesky_solve": (
        lambda x, y: torch.cholesky_solve(y, torch.linalg.cholesky(x @ x.mT + 64 * torch.eye(64))),
        (8, 64, 64),
        (8, 64, 32),
    ),
    "linalg cross": (lambda x, y: torch.linalg.cross(x, y), (8192, 3), (8192, 3)),
    "vander": (lambda x: torch.linalg.vander(x, N=128), (256,)),
}
