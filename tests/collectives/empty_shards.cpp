// Gathers and sums shards of no bytes, which lie at null, on two ranks: threads of one process.
#include <cstdlib>
#include <thread>

#include "common/collectives.h"
#include "common/layout.h"

int main() {
  using namespace ep;
  Comm comm[2] = {};
  Address control[2] = {};
  for (int rank = 0; rank < 2; ++rank) {
    comm[rank].rank = rank;
    comm[rank].num_ranks = comm[rank].num_experts = 2;
    comm[rank].gate = kNoStep;
    comm[rank].timeout_ns = 10'000'000'000;
    comm[rank].state = reinterpret_cast<Address>(std::aligned_alloc(4096, 1 << 20));
    comm[rank].board = reinterpret_cast<Address>(std::aligned_alloc(4096, 1 << 20));
    comm[rank].control = reinterpret_cast<Address>(control);
    comm[rank].own_control = control[rank] = reinterpret_cast<Address>(std::aligned_alloc(4096, 4 << 20));
    for (auto [address, bytes] :
         {std::pair{comm[rank].state, 1 << 20}, {comm[rank].board, 1 << 20}, {control[rank], 4 << 20}})
      std::fill_n(reinterpret_cast<char*>(address), bytes, 0);
  }
  const auto run = [&](int rank) {
    CpuAllGatherArgs gather{};
    gather.comm = comm[rank];
    gather.piece.block = -1;
    cpu::all_gather(gather);
    CpuReduceScatterArgs scatter{};
    scatter.comm = comm[rank];
    scatter.piece.block = -1;
    scatter.scale = 1.0;
    scatter.element = kFloat32;
    cpu::reduce_scatter(scatter);
  };
  std::thread other(run, 1);
  run(0);
  other.join();
}
