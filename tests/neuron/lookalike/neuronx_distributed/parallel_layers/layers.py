"""Parallel layers of our own with the names and attributes of NxD's, over gloo.

A layer is given the whole weight and keeps this rank's part. Nothing here was copied: what a class promises
is what its name and its attributes say.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


def rank_and_count() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def reduced(term: Tensor) -> Tensor:
    """The sum of all ranks' terms."""
    if rank_and_count()[1] > 1:
        dist.all_reduce(term := term.clone())
    return term


def gathered(part: Tensor) -> Tensor:
    """All ranks' parts, joined along the last axis."""
    count = rank_and_count()[1]
    if count == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(count)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, -1)


def sharded(whole: Tensor, dim: int, stride: int = 1) -> nn.Parameter:
    """This rank's part; with a stride, one of each of so many blocks."""
    rank, count = rank_and_count()
    parts = [block.chunk(count, dim)[rank] for block in whole.chunk(stride, dim)]
    parameter = nn.Parameter(torch.cat(parts, dim).clone(), requires_grad=False)
    marks = {"partition_dim": dim, "partition_stride": stride, "num_partitions": count}
    for name, value in {"tensor_model_parallel": True, **marks}.items():
        setattr(parameter, name, value)
    return parameter


class ColumnParallelLinear(nn.Module):
    """Rows of the weight over ranks, and so columns of the result."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, gather_output: bool = True, stride: int = 1
    ) -> None:
        super().__init__()
        self.output_size, self.input_size = weight.shape
        self.gather_output, self.stride = gather_output, stride
        self.weight = sharded(weight, 0, stride)
        self.bias = None if bias is None else sharded(bias, 0, stride)

    def forward(self, input: Tensor) -> Tensor:
        y = functional.linear(input, self.weight, self.bias)
        return gathered(y) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """Columns of the weight over ranks: each makes a term of the result, and one adds the bias.

    Terms are added up in float32, as matrix units accumulate them, and the result is rounded once; in another
    `reduce_dtype` each term is rounded, and so is each of their sums.
    """

    reduce_dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, reduce_output: bool = True) -> None:
        super().__init__()
        self.output_size, self.input_size = weight.shape
        self.input_is_parallel, self.reduce_output = True, reduce_output
        self.weight = sharded(weight, 1)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)

    def forward(self, input_: Tensor) -> Tensor:
        y = functional.linear(input_.to(self.reduce_dtype), self.weight.to(self.reduce_dtype))
        y = reduced(y) if self.reduce_output else y
        return (y if self.bias is None else y + self.bias).to(input_.dtype)


class ParallelEmbedding(nn.Module):
    """The rows of a vocabulary over ranks."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.shard_across_embedding, self.sequence_parallel_enabled = False, False
        self.weight = sharded(weight, 0)

    def forward(self, input_: Tensor) -> Tensor:
        held = self.weight.shape[0]
        local = input_ - rank_and_count()[0] * held
        is_held = (local >= 0) & (local < held)
        rows = functional.embedding(local.clamp(0, held - 1), self.weight)
        return reduced(rows * is_held[..., None])


class SPMDRank(nn.Module):
    """The number of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.tensor([rank_and_count()[0]]), requires_grad=False)

    def get_rank(self) -> Tensor:
        return self.rank
