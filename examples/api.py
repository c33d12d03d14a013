"""Route tokens to experts with MoECommunicator alone, on CPUs or GPUs as found.

torchrun --nproc-per-node 2 examples/api.py
"""

import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator, MoECommunicatorConfig

EXPERTS, HIDDEN, TOPK = 32, 1024, 4


def main() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    config = MoECommunicatorConfig(num_experts=EXPERTS, hidden_size=HIDDEN, topk=TOPK)
    comm = MoECommunicator(None, config)  # collective over the default group

    x = torch.randn(100 + rank, HIDDEN, device=device, requires_grad=True)  # ranks may differ in tokens, also have none
    weights, topk_ids = torch.rand(len(x), EXPERTS, device=device).topk(TOPK)  # global expert ids; -1 drops a pair

    # One row per (token, local expert), grouped by local expert: ready for a grouped GEMM.
    out, handle = comm.dispatch(x, topk_ids, weights)
    counts = out.num_tokens_per_expert_cpu.tolist()
    y = torch.cat([2.0 * rows for rows in out.tokens.split(counts)])  # each expert doubles its rows
    z = comm.combine(y, handle, weights=out.weights)  # [T, H]: each token's rows, weighted and summed
    z.sum().backward()  # differentiable: gradients travel back the same way

    torch.testing.assert_close(z, 2.0 * x * weights.sum(1, keepdim=True))
    print(f"rank {rank}: {len(x)} tokens, {sum(counts)} rows for {len(counts)} local experts")
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
