// Streams. The kernels of a stream run in order, each in its own threads. A kernel that is launched early may start
// before the kernel ahead has ended. With few SMs, CTAs wait for one each.
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>

#include "cta.h"

namespace simt {

namespace {

constexpr unsigned kAtOnce = 4;  // CTAs that run at a time, unless the launch is cooperative

struct Stream {
  std::shared_ptr<Job> last;
  std::vector<std::shared_ptr<Job>> after;  // of other streams: the next kernel comes after them
  std::shared_ptr<Job> gate;                // no kernel, but ends when the stream is opened
  uint64_t enqueued = 0, ended = 0;         // kernels
  std::atomic<unsigned> resident{0};        // with few SMs: CTAs that have one
};
std::mutex streams_mutex;
std::map<uint64_t, Stream>& streams() {
  static auto* made = new std::map<uint64_t, Stream>;
  return *made;
}

template <class Ready>
void wait_until(Ready ready) {
  for (unsigned pause_us = 20; !ready(); pause_us = std::min(2 * pause_us, 2000u)) usleep(pause_us);
}

// SMs that no CTA occupies.
class Sms {
 public:
  void limit(unsigned sms) {
    const std::lock_guard<std::mutex> lock(mutex_);
    present_ = free_ = sms;
  }
  bool are_few() const { return present_ != 0; }
  unsigned present() const { return present_; }
  bool take(unsigned sms) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (sms > free_) return false;
    free_ -= sms;
    return true;
  }
  void give(unsigned sms) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_ += sms;
  }

 private:
  std::mutex mutex_;
  unsigned present_ = 0, free_ = 0;
};
Sms sms;

bool is_over(const std::shared_ptr<Job>& job) { return job == nullptr || job->ended; }

// Takes the SMs of all CTAs that start together, if there are as many.
bool take_sms(Job& job) {
  const unsigned ctas = job.launch.together ? job.launch.ctas : 1;
  if (ctas > sms.present()) give_up("a cooperative launch of more CTAs than there are SMs");
  if (!sms.take(ctas)) return false;
  job.resident += ctas;
  *job.resident_on_stream += ctas;
  return true;
}

void run_on_few(Job& job) {
  const unsigned ctas = job.launch.ctas;
  std::vector<std::thread> running;
  for (unsigned index = 0; index < ctas; ++index) {
    const bool has_sms = index == 0 ? job.resident > 0 : job.launch.together;
    if (!has_sms) wait_until([&] { return take_sms(job); });
    running.emplace_back([&, index] {
      Cta(job, index).run();
      --job.resident;
      --*job.resident_on_stream;
      sms.give(1);
    });
  }
  for (std::thread& one : running) one.join();
}

void run_all(Job& job) {
  std::atomic<unsigned> next{0};
  const unsigned ctas = job.launch.ctas, workers = job.launch.together || ctas < kAtOnce ? ctas : kAtOnce;
  std::vector<std::thread> running;
  for (unsigned worker = 0; worker < workers; ++worker)
    running.emplace_back([&] {
      for (unsigned index = next++; index < ctas; index = next++) Cta(job, index).run();
    });
  for (std::thread& worker : running) worker.join();
}

void run(Job& job) {
  for (const std::shared_ptr<Job>& one : job.after) wait_until([&] { return is_over(one); });
  job.after.clear();
  if (const Job* ahead = job.ahead.get()) {
    const bool early = job.launch.early;
    wait_until([&] { return ahead->ended || (early && ahead->dependents_launched == ahead->launch.ctas); });
  }
  sms.are_few() ? run_on_few(job) : run_all(job);
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
  static std::atomic<unsigned> on_host{0};
  job->resident_on_stream = &on_host;
  if (launch.stream == 0) return run(*job);
  const std::lock_guard<std::mutex> lock(streams_mutex);
  Stream& stream = streams()[launch.stream];
  job->resident_on_stream = &stream.resident;
  job->ahead = stream.last;
  job->after = std::move(stream.after);
  stream.after.clear();
  stream.last = job;
  ++stream.enqueued;
  // Taken by the caller, so that it is decided which of two kernels comes first.
  const bool is_next = is_over(job->ahead) && std::all_of(job->after.begin(), job->after.end(), is_over);
  if (sms.are_few() && is_next) take_sms(*job);
  std::thread([job, &stream] {
    run(*job);
    const std::lock_guard<std::mutex> lock(streams_mutex);
    ++stream.ended;
  }).detach();
}

void limit_sms(unsigned count) { sms.limit(count); }

void order(uint64_t later, uint64_t earlier) {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  const Stream& from = streams()[earlier];
  std::vector<std::shared_ptr<Job>>& after = streams()[later].after;
  if (later == earlier) return;
  if (!is_over(from.last)) after.push_back(from.last);
  after.insert(after.end(), from.after.begin(), from.after.end());
}

void shut(uint64_t stream) {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  Stream& found = streams()[stream];
  found.gate = std::make_shared<Job>();
  found.after.push_back(found.gate);
}
void open(uint64_t stream) {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  streams()[stream].gate->ended = true;
}

unsigned resident(uint64_t stream) {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  return streams()[stream].resident;
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
  std::vector<std::shared_ptr<Job>> waited;
  {
    const std::lock_guard<std::mutex> lock(streams_mutex);
    waited = streams()[stream].after;
    waited.push_back(streams()[stream].last);
  }
  for (const std::shared_ptr<Job>& one : waited) wait_until([&] { return is_over(one); });
}

void wait_on_dependency() {
  const Job* ahead = here->cta->job.ahead.get();
  while (ahead != nullptr && !ahead->ended) poll_again();
}
void launch_dependents() { here->cta->launch_dependents(); }

}  // namespace simt
