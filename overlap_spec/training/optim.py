"""Muon for the layers' matrices, AdamW for the rest, and averaged weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from overlap_spec.models.packing import has_bfloat16
from overlap_spec.models.places import part_views

_NS = (3.4445, -4.7750, 2.0315)


def product_type(device: torch.device) -> torch.dtype:
    """What products are computed in: bfloat16 where the device multiplies it itself, else float32.

    A processor that does not is many times slower in it.
    """
    return torch.bfloat16 if device.type != "cpu" or has_bfloat16() else torch.float32


def mixed(device: torch.device) -> torch.autocast:
    """Products of float32 weights in :func:`product_type`."""
    reduced = product_type(device) is torch.bfloat16
    return torch.autocast(device.type, torch.bfloat16, enabled=reduced)


def orthogonalise(matrix: Tensor, dtype: torch.dtype, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix, by Newton-Schulz iterations in ``dtype``.

    Coefficients as in Muon (https://kellerjordan.github.io/posts/muon/): singular values end
    near 1, not exactly there. ``matrix (m, n)``, or several at once ``(B, m, n)``, of any float
    type → the same shape of ``dtype``.
    """
    a, b, c = _NS
    x = matrix.to(dtype)
    flipped = x.shape[-2] > x.shape[-1]
    if flipped:
        x = x.mT
    x = x / ((x.norm() if x.dim() == 2 else x.norm(dim=(1, 2), keepdim=True)) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = x.mT if flipped else x
    return out


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are made orthogonal.

    Args:
        params: Pairs (parameter, function that cuts it into the matrices to treat apart).
        lr: Step size at full schedule; weight_decay is multiplied by it.
    """

    def __init__(
        self,
        params: Iterable[tuple[nn.Parameter, Callable[[Tensor], list[Tensor]]]],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        pairs = list(params)
        self._cuts = {id(parameter): cut for parameter, cut in pairs}
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([parameter for parameter, _ in pairs], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update from the gradients."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if not trained:
                continue
            for parameter in trained:
                if "momentum" not in self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in trained]
            buffers = [self.state[parameter]["momentum"] for parameter in trained]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            updates = torch._foreach_lerp(gradients, buffers, group["momentum"])
            torch._foreach_mul_(trained, 1 - group["lr"] * group["weight_decay"])
            cuts = [self._cuts[id(parameter)] for parameter in trained]
            rows = [x for cut, whole in zip(cuts, trained, strict=True) for x in cut(whole)]
            pieces = [x for cut, whole in zip(cuts, updates, strict=True) for x in cut(whole)]
            steps = orthogonal_steps(pieces, rows[0].dtype)
            for shape, alike in by_shape(rows):
                factor = -group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                some = [rows[number] for number in alike]
                torch._foreach_add_(some, [steps[number] for number in alike], alpha=factor)


def by_shape(tensors: Sequence[Tensor]) -> Iterator[tuple[torch.Size, list[int]]]:
    """The numbers of those that have a shape in common."""
    for shape in dict.fromkeys(x.shape for x in tensors):
        yield shape, [number for number, x in enumerate(tensors) if x.shape == shape]


def orthogonal_steps(pieces: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Each of the matrices made orthogonal, in ``dtype``.

    A GPU makes those of one shape at once: small products take it less than their launches.
    """
    inside = product_type(pieces[0].device)
    if not pieces[0].is_cuda:
        return [orthogonalise(piece, inside).to(dtype) for piece in pieces]
    steps = list(pieces)
    for _, alike in by_shape(pieces):
        together = orthogonalise(torch.stack([pieces[number] for number in alike]), inside)
        for number, step in zip(alike, together.to(dtype).unbind(), strict=True):
            steps[number] = step
    return steps


def make_optimizers(
    module: nn.Module, muon_lr: float, adam_lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for the projections inside layers, AdamW for embeddings, heads and norms."""
    matrices: list[tuple[nn.Parameter, Callable[[Tensor], list[Tensor]]]] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2 and "embed" not in name and "lm_head" not in name:
            matrices.append((parameter, _cutter(module, name)))
        else:
            others.append(parameter)
    adam = torch.optim.AdamW(
        others,
        lr=adam_lr,
        betas=(0.9, 0.98),
        eps=1e-9,
        weight_decay=0.0,
        fused=True if others[0].is_cuda else None,
    )
    return [Muon(matrices, lr=muon_lr), adam]


def _cutter(module: nn.Module, name: str) -> Callable[[Tensor], list[Tensor]]:
    return lambda tensor: part_views(module, name, tensor)


def schedule(progress: float, step: int, warm_up: int = 50, decay_from: float = 0.45) -> float:
    """Factor on the learning rate: linear warm-up, constant, then linear decay to 2%.

    Args:
        progress: Share of the budget that is used, 0 to 1.
        step: Steps done.
    """
    rise = min(1.0, (step + 1) / warm_up)
    fall = 1.0 if progress < decay_from else (1 - progress) / (1 - decay_from)
    return rise * max(fall, 0.02)


class Average:
    """Exponential moving average of a module's parameters, float32."""

    def __init__(self, module: nn.Module, decay: float = 0.998) -> None:
        self.decay = decay
        self.values = {n: p.detach().clone() for n, p in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Move towards the module; faster at the start, where the average is still random."""
        decay = min(self.decay, (step + 1) / (step + 20))
        now = dict(module.named_parameters())
        torch._foreach_lerp_([self.values[n] for n in now], list(now.values()), 1 - decay)

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Write the average into ``module``."""
        for name, parameter in module.named_parameters():
            parameter.copy_(self.values[name])
