// Streams. The kernels of a stream run in order, each in its own threads. A kernel that is launched early may start
// before the kernel ahead has ended.
#include <unistd.h>

#include <map>
#include <mutex>
#include <thread>

#include "cta.h"

namespace simt {

namespace {

constexpr unsigned kAtOnce = 4;  // CTAs that run at a time, unless the launch is cooperative

struct Stream {
  std::shared_ptr<Job> last;
  uint64_t enqueued = 0, ended = 0;  // kernels
};
std::mutex streams_mutex;
std::map<uint64_t, Stream>& streams() {
  static auto* made = new std::map<uint64_t, Stream>;
  return *made;
}

template <class Ready>
void wait_until(Ready ready) {
  while (!ready()) usleep(20);
}

void run(Job& job) {
  if (const Job* ahead = job.ahead.get()) {
    const bool early = job.launch.early;
    wait_until([&] { return ahead->ended || (early && ahead->dependents_launched == ahead->launch.ctas); });
  }
  std::atomic<unsigned> next{0};
  const unsigned ctas = job.launch.ctas, workers = job.launch.together || ctas < kAtOnce ? ctas : kAtOnce;
  std::vector<std::thread> running;
  for (unsigned worker = 0; worker < workers; ++worker)
    running.emplace_back([&] {
      for (unsigned index = next++; index < ctas; index = next++) Cta(job, index).run();
    });
  for (std::thread& worker : running) worker.join();
  if (job.ahead != nullptr) {
    expect(job.ahead->ended, "a kernel ends before the one ahead of it, for which the one behind would not wait");
    job.ahead = nullptr;
  }
  job.ended = true;
}

}  // namespace

void enqueue(const Launch& launch, std::function<void()> kernel) {
  if (launch.ctas == 0) give_up("a launch of no CTAs");
  auto job = std::make_shared<Job>();
  job->launch = launch;
  job->kernel = std::move(kernel);
  if (launch.stream == 0) return run(*job);
  const std::lock_guard<std::mutex> lock(streams_mutex);
  Stream& stream = streams()[launch.stream];
  job->ahead = stream.last;
  stream.last = job;
  ++stream.enqueued;
  std::thread([job, &stream] {
    run(*job);
    const std::lock_guard<std::mutex> lock(streams_mutex);
    ++stream.ended;
  }).detach();
}

uint64_t enqueued(uint64_t stream) {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  return streams()[stream].enqueued;
}
uint64_t ended(uint64_t stream) {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  return streams()[stream].ended;
}

void synchronize(uint64_t stream) {
  std::shared_ptr<Job> last;
  {
    const std::lock_guard<std::mutex> lock(streams_mutex);
    last = streams()[stream].last;
  }
  if (last != nullptr) wait_until([&] { return last->ended.load(); });
}

void wait_on_dependency() {
  const Job* ahead = here->cta->job.ahead.get();
  while (ahead != nullptr && !ahead->ended) poll_again();
}
void launch_dependents() { here->cta->launch_dependents(); }

}  // namespace simt
