"""What drawn programs are made of: inputs, layers, and templates of statements, by group.

A template has *places*: ``{f}`` and ``{f2}`` are two values of the kind ``"f"`` (``KINDS``), ``{s}`` is one
of the shape of the first place's value, and ``{n}`` a number. ``=`` stands for the names of the results,
``=2`` for two of them. A group is drawn first, by its weight, then one of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxremat

WIDTH = 6
ROWS = (3, 40, 300)


class Doubled(torch.autograd.Function):
    """A user's own function, with a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * 2 * (1 - y * y)


class Layers(nn.Module):
    """What a program may use: parameters, one of them twice, buffers, layers with state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.8))
        self.register_buffer("state", torch.randn(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.linear, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.linear.weight
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.frozen_norm = nn.BatchNorm1d(WIDTH).eval()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.drop = nn.Dropout(0.4)
        self.embedding = nn.Embedding(5, WIDTH)
        self.convolution, self.image_norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.block = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)
        )


NAMESPACE = {
    "torch": torch,
    "F": F,
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "Doubled": Doubled,
    "fxremat": fxremat,
    "Layers": Layers,
}

KINDS: dict[str, Callable[[Tensor], bool]] = {
    "f": lambda x: x.is_floating_point(),
    "m": lambda x: (
        x.is_floating_point() and x.dim() == 2 and x.shape[1] == WIDTH and x.dtype == torch.float32
    ),
    "k": lambda x: KINDS["m"](x) and len(x) > 0,  # a batch normalisation of no rows ends the process
    "g": lambda x: x.dtype == torch.float32 and x.dim() == 4 and x.shape[1:] == (3, 4, 4) and len(x) > 0,
    "i": lambda x: x.dtype == torch.int64,
    "b": lambda x: x.dtype == torch.bool,
    "c": lambda x: x.is_complex(),
    "v": lambda x: True,
}

TEMPLATES: dict[str, tuple[str, ...]] = {
    "pointwise": (
        "= {f}.tanh()",
        "= {f}.sin()",
        "= {f}.clamp(max=3).exp()",
        "= {f}.sigmoid() * {s}",
        "= F.relu({f})",
        "= F.gelu({f})",
        "= F.silu({f})",
        "= F.softplus({f})",
        "= F.leaky_relu({f})",
        "= F.hardswish({f})",
        "= {f}.square()",
        "= ({f}.abs() + 1).rsqrt()",
        "= {f} * {n}",
        "= {n} - {f}",
        "= {f} + {s}",
        "= {f} - {s}",
        "= {f} * {s}",
        "= {f} / ({s}.abs() + 1)",
        "= {f} + {f2}",
        "= {f} * {f2}",
        "= torch.maximum({f}, {s})",
        "= torch.where({f} > 0, {f}, {s})",
        "= torch.where({b}, {f}, 0.5)",
        "= {f}.masked_fill({f} > {n}, 0.25)",
        "= torch.lerp({f}, {s}, 0.3)",
        "= torch.addcmul({f}, {s}, {s2}, value=0.5)",
        "= {f}.double()",
        "= {f}.float()",
        "= {f}.bfloat16()",
        "= {f} * {i}",
        "= {f}.nan_to_num()",
        "= {f} * self.scale",
        "= {f}.abs().log1p()",
        "= Doubled.apply({f})",
        "= torch.hypot({f}, {s})",
        "= F.prelu({f}, self.scale.reshape(1))",
    ),
    "view": (
        "= {v}.t()",
        "= {v}[1:]",
        "= {v}[:, ::2]",
        "= {v}[..., :3]",
        "= {v}[0]",
        "= {v}[None]",
        "= {v}.flatten()",
        "= {v}.reshape(-1, 2)",
        "= {v}.transpose(0, -1)",
        "= {v}.unsqueeze(0).expand(3, *{v}.shape)",
        "= {v}.expand(2, *{v}.shape)",
        "= {f}.detach()",
        "= {v}.diagonal()",
        "= {v}.narrow(0, 0, 1)",
        "= {f}.unfold(-1, 2, 1)",
        "= {f}.as_strided((2, 2), (1, 2))",
        "= {c}.real",
        "= {c}.imag",
        "= torch.view_as_real({c})",
        "= {v}.movedim(0, -1)",
        "= {v}.squeeze()",
        "= {v}.view({v}.shape)",
        "= self.weight[1:]",
        "= self.state.expand(4, 6)",
    ),
    "copy": (
        "= {v}.clone()",
        "= {v}.contiguous()",
        "= {v}.flip(0)",
        "= {f}.roll(1, 0)",
        "= torch.cat([{f}, {s}], 0)",
        "= torch.cat([{f}, {f}[:0]])",
        "= torch.stack([{f}, {s}], -1)",
        "= {g}.contiguous(memory_format=torch.channels_last)",
        "= F.pad({f}, (1, 2))",
        "= {f}.repeat(2, 1)",
        "= torch.tril({f})",
        "= {f}.repeat_interleave(2, -1)",
    ),
    "outputs": (
        "=2 {f}.chunk(2, -1)",
        "=2 {f}.split([2, 4], -1)",
        "=3 {f}.split([1, 2, 3], -1)",
        "=3 {f}.unbind(-1)",
        "=2 {f}.unsafe_chunk(2, -1)",
        "=2 {f}.topk(2, -1)",
        "=2 {f}.max(-1)",
        "=2 {f}.sort(-1)",
        "=2 {f}.kthvalue(1, -1)",
        "=2 {f}.cummax(-1)",
        "=2 torch.var_mean({f}, -1)",
        "=2 torch.aminmax({f})",
        "=2 torch.frexp({f})",
        "=3 torch.native_layer_norm({m}, (6,), self.norm.weight, self.bias, 1e-5)",
        "=3 torch.native_batch_norm({k}, self.bias, None, self.state, self.state.exp(), False, 0.1, 1e-5)",
        "=3 torch.native_batch_norm({k}, self.bias, self.state, None, None, True, 0.1, 1e-5)",
        "=2 F.max_pool2d({g}, 2, return_indices=True)",
        "=2 torch.meshgrid({f}[0].flatten()[:3], {f2}[0].flatten()[:3], indexing='ij')",
        "=2 F.multi_head_attention_forward({m}, {m}, {m}, 6, 2, torch.cat([self.weight] * 3), None, None, "
        "None, False, 0.1, self.weight, self.bias)",
    ),
    "reduction": (
        "= {f}.sum()",
        "= {f}.mean(-1)",
        "= {f}.mean(0, keepdim=True)",
        "= {f}.logsumexp(-1)",
        "= {f}.softmax(-1)",
        "= {f}.log_softmax(-1)",
        "= {f}.cumsum(0)",
        "= {f}.tanh().cumprod(-1)",
        "= {f}.norm(dim=-1)",
        "= {f}.amax(-1)",
        "= {f}.std()",
        "= {f}.tanh().prod(-1)",
        "= {f}.median()",
        "= F.mse_loss({f}, {s})",
        "= F.normalize({f}, dim=-1)",
    ),
    "layer": (
        "= self.linear({m})",
        "= self.tied({m})",
        "= self.frozen({m})",
        "= self.norm({f})",
        "= self.batch_norm({k})",
        "= self.frozen_norm({k})",
        "= self.block({m})",
        "= checkpoint(self.block, {m})",
        "= {m} @ self.weight",
        "= {m} @ self.weight.t() + self.bias",
        "= torch.addmm(self.bias, {m}, self.weight)",
        "= F.linear({f}, self.weight)",
        "= {f} @ {s}.transpose(-1, -2) / 6",
        "= self.convolution({g})",
        "= self.image_norm({g})",
        "= F.max_pool2d({g}, 3, 1, 1)",
        "= F.avg_pool2d({g}, 3, 1, 1)",
        "= F.interpolate({g}, scale_factor=2)[..., ::2, ::2]",
        "= F.group_norm({g}, 3)",
        "= F.rms_norm({f}, (6,))",
        "= F.instance_norm({g})",
        "= F.batch_norm({k}, None, None, training=True)",
        "= self.embedding({i} % 5)",
        "= F.scaled_dot_product_attention({m}[None], {m2}[None], {m2}[None])",
        "= F.cross_entropy({m}, {i} % 6)",
        "= F.glu({f})",
        "= {g}.flatten(1)[:, :6]",
    ),
    "random": (
        "= self.drop({f})",
        "= F.dropout({f}, 0.3)",
        "= F.dropout2d({g}, 0.3)",
        "= F.alpha_dropout({f}, 0.3)",
        "= torch.rand_like({f})",
        "= {f} + torch.randn({f}.shape)",
        "= torch.bernoulli({f}.sigmoid())",
        "= F.rrelu({f}, training=True)",
        "= F.scaled_dot_product_attention({m}[None], {m}[None], {m}[None], dropout_p=0.2)",
        "= torch.randperm(3)",
    ),
    "index": (
        "= {f}[{i} % 3]",
        "= {f}.index_select(0, {i}.flatten() % 3)",
        "= {f}.gather(0, ({i} % 3).unsqueeze(-1).expand(*{i}.shape, 2))",
        "= {f}.index_add(0, {i} % 3, {s})",
        "= {f}.scatter_add(0, ({i} % 3).unsqueeze(-1).expand(*{i}.shape, 2), {s})",
        "= {f}.index_put(({i} % 3,), {f2}[:1], accumulate=True)",
        "= {f}.take_along_dim({f}.argsort(-1), -1)",
        "= {f}[:, [0, 2, 0]]",
        "= {f}[{b}]",
        "= {f}.masked_scatter({b}, {f2}.float())",
    ),
    "other": (
        "= {f}.argmax(-1)",
        "= {f} > {n}",
        "= {f}.argsort(-1)[..., 0]",
        "= ({f} > 0).long()",
        "= {i} + 1",
        "= {b}.sum()",
        "= {b} & ~{b2}",
        "= {i} == {i2}",
        "= torch.complex({f}.float(), {s}.float())",
        "= {c} * {c2}.conj()",
        "= {c}.abs()",
        "= {c}.exp() / 9",
        "= {c}.angle()",
        "= {c}.conj()",
        "= torch.fft.rfft({f}.float())",
        "= torch.zeros_like({f})",
        "= torch.ones(6)",
        "= torch.arange(6)",
        "= torch.tensor([1.0, 2.0, 3.0]).sum()",
        "= torch.empty(0, 6)",
        "= {f}[:0]",
        "= torch.full((2, 3), {n})",
        "= self.state + 1",
        "= self.count + 1",
    ),
    "write": (
        "{f}.add_(1)",
        "{f}.mul_({s})",
        "{f}.mul_({n}).add_({s})",
        "{f} += {s}",
        "{f}[0] = 1.0",
        "{f}[1:].mul_(2)",
        "{f}[:, 1:3] = {s}[:, 1:3] * 2",
        "{f}[..., 0] = {f2}.sum()",
        "{f}[{f} > 0] = 0.5",
        "{f}.masked_fill_({f} > {n}, 0.1)",
        "{f}.copy_({s})",
        "{f}.t()[0].mul_(2)",
        "{f}.zero_()",
        "{f}.relu_()",
        "{f}.tanh_()",
        "{f}.detach().add_(1)",
        "{f}.unsqueeze_(0)",
        "{f}.t_()",
        "{f}.uniform_()",
        "F.dropout({f}, 0.3, inplace=True)",
        "F.relu({f}, inplace=True)",
        "{f}.index_add_(0, {i} % 3, {s})",
        "{f}.index_put_(({i} % 3,), {s}[:1])",
        "{f}.flatten()[2:5].add_(0.5)",
        "{f}.diagonal().fill_(0.3)",
        "{i}.add_(1)",
        "{b}.logical_not_()",
        "{c}.mul_(2)",
        "{c}.real.add_(1)",
        "{f}.sub_({f2}.mean())",
    ),
    "state": (
        "self.state.mul_(0.9).add_({m}.detach().mean(0), alpha=0.1)",
        "self.state[1:].copy_({m}.detach()[0, 1:])",
        "self.state.copy_({m}.detach().amax(0))",
        "self.count.add_(1)",
        "self.count += {b}.sum()",
        "self.state.add_(self.count * 0.1)",
        "self.state = self.state * 0.5",
    ),
    "break": (
        "torch._dynamo.graph_break()",
        "= {f} * (2 if {f2}.sum() > 0 else 3)",
        "= {f} * {f2}.sum().item()",
    ),
}
WEIGHTS = {
    "pointwise": 9,
    "view": 6,
    "copy": 3,
    "outputs": 4,
    "reduction": 3,
    "layer": 7,
    "random": 3,
    "index": 2,
    "other": 3,
    "write": 5,
    "state": 1,
    "break": 0.6,
}
REGIONS = (
    "torch.no_grad()",
    "torch.autocast('cpu', dtype=torch.bfloat16)",
    "torch.enable_grad()",
    "fxremat.region(keep=True)",
    "fxremat.region(mirror=2)",
)
INPUTS: tuple[str, ...] = (
    "torch.randn({rows}, 6)",
    "leaf(torch.randn({rows}, 6))",
    "leaf(torch.randn({rows}, 6)) * 1",
    "torch.randn(6, {rows}).t()",
    "leaf(torch.randn(6, {rows}).t())",
    "torch.randn(1, 6).expand({rows}, 6)",
    "leaf(torch.randn(1, 6)).expand({rows}, 6)",
    "torch.randn(2 * {rows}, 6)[::2]",
    "torch.randn(2, 3, 4, 4)",
    "leaf(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))",
    "torch.randn(8, 3, 4, 4).contiguous(memory_format=torch.channels_last)",
    "torch.randint(0, 4, ({rows},))",
    "torch.rand({rows}, 6) > 0.5",
    "torch.randn({rows}, 6, dtype=torch.complex64)",
    "leaf(torch.randn(3, 6, dtype=torch.complex64))",
    "torch.randn(0, 6)",
    "torch.tensor(1.5)",
    "leaf(torch.tensor(0.5))",
    "torch.randn({rows}, 6).bfloat16()",
    "leaf(torch.randn({rows}, 6).double())",
    "given[0]",
    "given[0][1:]",
    "given[0].detach()",
)
