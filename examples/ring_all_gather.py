"""An all-gather built of send and receive: every rank passes on, step by step, what it has received.

torchrun --nproc-per-node 2 examples/ring_all_gather.py
"""

import torch
import torch.distributed as dist

from ep_plugin import SendReceive


def ring_all_gather(p2p: SendReceive, mine: torch.Tensor) -> torch.Tensor:
    """Returns ``[R, n]``, the tensor `mine` ``[n]`` of every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    parts = mine.new_empty((ranks, len(mine)))
    parts[rank] = mine
    for step in range(ranks - 1):  # the part of rank - step goes on, the part of the rank before it comes
        here, coming = (rank - step) % ranks, (rank - step - 1) % ranks
        p2p.exchange(parts[here], parts[coming], after, before).wait()
    return parts


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.randn(1_000_003, generator=torch.Generator().manual_seed(rank))
    with SendReceive() as p2p:  # collective over the default group
        parts = ring_all_gather(p2p, mine)
    expected = torch.empty(ranks * len(mine))
    dist.all_gather_into_tensor(expected, mine)
    print(f"rank {rank}: {ranks} parts, equal to gloo's bit for bit: {torch.equal(parts.flatten(), expected)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
