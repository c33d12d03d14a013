// Bulk copies and their barriers. A copy moves its bytes at any moment that the rules allow, chosen at random.
#include <cstring>

#include "cta.h"

namespace simt {

// --- The copies of a CTA

bool Cta::move_some() {
  const size_t all = loads.size() + stores.size();
  if (all == 0) return false;
  const size_t chosen = random() % all;
  if (chosen < loads.size())
    land(chosen);
  else if (const size_t store = chosen - loads.size(); stores[store].read)
    write(store);
  else
    read(store);
  return true;
}
void Cta::read(size_t i) {
  Store& store = stores[i];
  store.held.assign(store.from, store.from + store.bytes);
  store.read = true;
}
void Cta::write(size_t i) {
  std::memcpy(stores[i].to, stores[i].held.data(), stores[i].bytes);
  stores.erase(stores.begin() + static_cast<std::ptrdiff_t>(i));
}

// --- Barriers. A word has the phase, the arrivals of a phase, the missing arrivals and the missing bytes.
namespace {

struct Barrier {
  uint32_t phase : 1;
  uint32_t arrivals : 15;
  uint32_t missing : 15;
  int32_t bytes;

  void pass() {
    if (missing != 0 || bytes != 0) return;
    phase ^= 1;
    missing = arrivals;
  }
};
static_assert(sizeof(Barrier) == sizeof(uint64_t), "a barrier is a word");

Barrier& barrier_at(uint64_t* word) { return *reinterpret_cast<Barrier*>(word); }
Barrier& made_barrier_at(uint64_t* word) {
  expect(here->cta->barriers.count(word) != 0, "a barrier that was not made");
  return barrier_at(word);
}

bool is_shared(const void* begin, size_t bytes) {
  const char* at = static_cast<const char*>(begin);
  return at >= ep::cuda::dynamic_shared && at + bytes <= ep::cuda::dynamic_shared + here->cta->shared_bytes;
}
bool is_aligned(const void* address, uint32_t bytes) {
  return (reinterpret_cast<uintptr_t>(address) | bytes) % 16 == 0;
}

}  // namespace

void Cta::land(size_t i) {
  const Load load = loads[i];
  loads.erase(loads.begin() + static_cast<std::ptrdiff_t>(i));
  std::memcpy(load.to, load.from, load.bytes);
  Barrier& barrier = barrier_at(load.barrier);
  barrier.bytes -= static_cast<int32_t>(load.bytes);
  barrier.pass();
}

void barrier_init(uint64_t* word, uint32_t arrivals) {
  expect(is_shared(word, 8) && reinterpret_cast<uintptr_t>(word) % 8 == 0,
         "a barrier that is no word of shared memory");
  here->cta->barriers.insert(word);
  barrier_at(word) = Barrier{0, arrivals & 0x7FFFu, arrivals & 0x7FFFu, 0};
}
void barrier_arrive_expect(uint64_t* word, uint32_t bytes) {
  Barrier& barrier = made_barrier_at(word);
  expect(barrier.missing > 0, "arrives at a barrier whose phase has all its arrivals");
  barrier.bytes += static_cast<int32_t>(bytes);
  --barrier.missing;
  barrier.pass();
}
bool barrier_passed(uint64_t* word, uint32_t parity) {
  if (made_barrier_at(word).phase != parity) return true;
  poll_again();
  return barrier_at(word).phase != parity;
}

void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  expect(is_aligned(to, bytes) && is_aligned(from, bytes), "a bulk load that is not aligned to 16 bytes");
  expect(bytes > 0 && is_shared(to, bytes), "a bulk load to outside of the CTA's shared memory");
  made_barrier_at(barrier);
  here->cta->loads.push_back({barrier, static_cast<char*>(to), static_cast<const char*>(from), bytes});
}
void bulk_store(void* to, const void* from, uint32_t bytes) {
  expect(is_aligned(to, bytes) && is_aligned(from, bytes), "a bulk store that is not aligned to 16 bytes");
  expect(bytes > 0 && is_shared(from, bytes), "a bulk store from outside of the CTA's shared memory");
  const uint32_t group = static_cast<Thread*>(here)->groups;
  here->cta->stores.push_back({here, group, static_cast<char*>(to), static_cast<const char*>(from), bytes, {}});
}
void bulk_commit() { ++static_cast<Thread*>(here)->groups; }
void bulk_wait(unsigned pending, bool written) {
  Cta& cta = *here->cta;
  const uint32_t groups = static_cast<Thread*>(here)->groups;
  const auto waits_for = [&](const Store& store) { return store.by == here && store.group + pending < groups; };
  for (size_t i = 0; i < cta.stores.size();) {
    const bool mine = waits_for(cta.stores[i]);
    cta.stores[i].waited_for |= mine;
    if (mine && !cta.stores[i].read) cta.read(i);
    if (mine && written)
      cta.write(i);
    else
      ++i;
  }
}

}  // namespace simt
