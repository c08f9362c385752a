"""Where a user would put ``torch.utils.checkpoint`` into the networks of the zoo.

A *way* to wrap a network says which pieces of it run under checkpoint. Networks that are a chain of blocks
are cut into segments of one, two, three blocks, and into about as many segments as the root of the number
of blocks. What has no list of blocks is wrapped where its author would do it:

    lstm        so many time steps of a layer at once, up to whole layers
    unet        the convolutions of each level, or all that is below the first level
    densenet    segments of its layers, or what each layer appends to its input (the concatenation is not
                recomputed: it is the memory-efficient DenseNet of Pleiss et al. 2017, arXiv:1707.06990)

A network is wrapped in place, by a class that runs the same modules: names, weights and results stay.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attention
import networks
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = ["MODELS", "Run", "checkpointed", "saves_products", "ways"]

Run = Callable[..., Any]  # a piece of a network and its operands: runs it, under checkpoint
Way = Callable[[], None]  # wraps a network


def checkpointed(context_fn: Callable[[], Any] | None = None) -> Run:
    """What runs a piece of a network under checkpoint, under selective checkpoint if a context is given.

    The pieces draw no random numbers, so the generator's state need not be kept: less memory, less time.
    """
    selective = {} if context_fn is None else {"context_fn": context_fn}
    return functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **selective)


def saves_products() -> Run:
    """Selective checkpoint that saves the results of products, convolutions and attention."""
    return checkpointed(functools.partial(create_selective_checkpoint_contexts, _save_products))


_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_SAVED = frozenset(getattr(torch.ops.aten, name).default for name in _PRODUCTS)


def _save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def ways(name: str, module: nn.Module, inputs: tuple[Tensor, ...], run: Run) -> Mapping[str, Way]:
    """The ways to wrap a module of the zoo by their names, that with the smallest pieces first.

    Args:
        name: The name of its case.
        module: The module, which the way that is called wraps.
        inputs: What it is called with.
        run: Runs each of the pieces.
    """
    return MODELS[name](module, inputs, run)


def segment_lengths(blocks: int) -> list[int]:
    """Blocks per segment: one, two, three, and what makes about root-of-n segments."""
    root = math.ceil(blocks / max(1, round(math.sqrt(blocks))))
    return sorted({length for length in (1, 2, 3, root) if length <= blocks})


# --- Chains -------------------------------------------------------------------------------------------


class Chain(nn.Sequential):
    """A Sequential of which some stretches run as pieces: ``pieces`` says where, and which of them do."""

    run: Run
    pieces: Sequence[tuple[int, int, bool]]

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        for start, stop, is_piece in self.pieces:
            through = _through(layers[start:stop])
            x = self.run(through, x) if is_piece else through(x)
        return x


def _through(layers: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
    def run_in_turn(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return run_in_turn


def _cut(chain: nn.Sequential, starts: Sequence[int], stop: int, length: int, run: Run) -> None:
    """Cut a chain into pieces of so many blocks.

    Args:
        chain: The chain.
        starts: Where its blocks start.
        stop: Where its last block ends.
        length: Blocks per piece.
        run: Runs a piece.
    """
    edges = [*starts[::length], stop]
    pieces = [(low, high, True) for low, high in itertools.pairwise(edges)]
    chain.__class__ = Chain
    chain.run = run
    chain.pieces = [(0, edges[0], False), *pieces, (stop, len(chain), False)]


def _chain_of(*kinds: type[nn.Module], at: str = "network", size: int = 1) -> Callable[..., dict[str, Way]]:
    """The ways to wrap a network with a Sequential of blocks.

    Args:
        *kinds: The modules that blocks begin with.
        at: Where the Sequential is.
        size: How many modules a block has.
    """

    def ways_of(module: nn.Module, inputs: tuple[Tensor, ...], run: Run) -> dict[str, Way]:
        chain = module.get_submodule(at)
        found = [index for index, layer in enumerate(chain) if isinstance(layer, kinds)]
        lengths = segment_lengths(len(found))
        stop = found[-1] + size
        return {
            f"every {length}": functools.partial(_cut, chain, found, stop, length, run) for length in lengths
        }

    return ways_of


# --- Networks without one list of blocks --------------------------------------------------------------


class EncoderDecoderInPieces(attention.EncoderDecoder):
    """Decoder blocks, each with its cross-attention, in pieces; the encoder is a Chain."""

    run: Run
    length: int

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.norm_memory(self.encoder(source))
        blocks = list(zip(self.norms, self.crosses, self.decoder, strict=True))
        for start in range(0, len(blocks), self.length):
            target = self.run(_decode(blocks[start : start + self.length]), target, memory)
        return target


def _decode(blocks: Sequence[tuple[nn.Module, nn.Module, nn.Module]]) -> Callable[[Tensor, Tensor], Tensor]:
    def run_in_turn(target: Tensor, memory: Tensor) -> Tensor:
        for norm, cross, block in blocks:
            target = block(target + cross(norm(target), memory))
        return target

    return run_in_turn


def _encoder_decoder(module: nn.Module, inputs: tuple[Tensor, ...], run: Run) -> dict[str, Way]:
    network = module.get_submodule("network")
    count = len(network.encoder)

    def wrap(length: int) -> None:
        _cut(network.encoder, range(count), count, length, run)
        network.__class__ = EncoderDecoderInPieces
        network.run, network.length = run, length

    return {f"every {length}": functools.partial(wrap, length) for length in segment_lengths(count)}


class LSTMInPieces(networks.UnrolledLSTM):
    """Time steps of a layer in pieces; ``length`` 0 makes a piece of the whole layer."""

    run: Run
    length: int

    def forward(self, x: Tensor) -> Tensor:
        steps = list(x.unbind(0))
        length = self.length or len(steps)
        for given, state in zip(self.given, self.state, strict=True):
            h = c = torch.zeros_like(steps[0])
            above: list[Tensor] = []
            for start in range(0, len(steps), length):
                c, *outputs = self.run(_cells(given, state), h, c, *steps[start : start + length])
                h = outputs[-1]
                above += outputs
            steps = above
        return torch.stack(steps)


def _cells(given: nn.Module, state: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    def run_in_turn(h: Tensor, c: Tensor, *steps: Tensor) -> tuple[Tensor, ...]:
        outputs = []
        for below in steps:
            i, f, g, o = (given(below) + state(h)).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return c, *outputs

    return run_in_turn


def _lstm(module: nn.Module, inputs: tuple[Tensor, ...], run: Run) -> dict[str, Way]:
    network = module.get_submodule("network")
    steps = inputs[0].shape[0]

    def wrap(length: int) -> None:
        network.__class__ = LSTMInPieces
        network.run, network.length = run, length

    lengths = segment_lengths(steps)
    return {
        **{f"{length} steps": functools.partial(wrap, length) for length in lengths},
        "layers": functools.partial(wrap, 0),
    }


class UNetInPieces(networks.UNet):
    """The convolutions of the level in pieces, or all below the level in one."""

    run: Run
    whole: bool

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            skip = self.down(x)
            return self.up(torch.cat([skip, self.run(self.below, skip)], dim=1))
        skip = self.run(self.down, x)
        if self.inner is None:
            return self.run(self.up, skip)
        return self.run(self.join, skip, self.below(skip))

    def below(self, skip: Tensor) -> Tensor:
        """What the next level makes of the skip, at the level's size."""
        return functional.interpolate(self.inner(functional.max_pool2d(skip, 2)), scale_factor=2.0)

    def join(self, skip: Tensor, inner: Tensor) -> Tensor:
        """The level's output; the concatenation is part of the piece."""
        return self.up(torch.cat([skip, inner], dim=1))


def _unet(module: nn.Module, inputs: tuple[Tensor, ...], run: Run) -> dict[str, Way]:
    def wrap(levels: Sequence[networks.UNet], whole: bool) -> None:
        for level in levels:
            level.__class__ = UNetInPieces
            level.run, level.whole = run, whole

    levels = [each for each in module.modules() if isinstance(each, networks.UNet)]
    return {
        "convolutions": functools.partial(wrap, levels, whole=False),
        "below level 1": functools.partial(wrap, levels[:1], whole=True),
    }


class DenseLayerInPieces(networks.DenseLayer):
    """What the layer appends is a piece; the concatenation is none."""

    run: Run

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.run(self.append, x)], dim=1)

    def append(self, x: Tensor) -> Tensor:
        """The new channels."""
        return self.convolution(functional.relu(self.norm(x)))


def _densenet(module: nn.Module, inputs: tuple[Tensor, ...], run: Run) -> dict[str, Way]:
    def wrap() -> None:
        for layer in module.modules():
            if isinstance(layer, networks.DenseLayer):
                layer.__class__ = DenseLayerInPieces
                layer.run = run

    segments = _chain_of(networks.DenseLayer)(module, inputs, run)
    return {"branches": wrap, **segments}


MODELS: dict[str, Callable[..., dict[str, Way]]] = {
    "transformer": _chain_of(attention.Block),
    "llama": _chain_of(attention.LlamaBlock),
    "resnet": _chain_of(networks.BasicBlock),
    "unet": _unet,
    "densenet": _densenet,
    "lstm": _lstm,
    "vision_transformer": _chain_of(attention.Block, at="network.blocks"),
    "encoder_decoder": _encoder_decoder,
    "language_model": _chain_of(attention.Block, at="network.blocks"),
    "gated_mlp": _chain_of(networks.Residual),
    "tanh_mlp": _chain_of(nn.Linear, size=2),
    "resnet50": _chain_of(nn.Module, at="body"),
    "resnet152": _chain_of(nn.Module, at="body"),
}
"""Networks that can be compared by their gradients: those that draw no random numbers."""
