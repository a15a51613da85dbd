// SPDX-License-Identifier: Apache-2.0
//
// A pool has 64 slots, one for each region in progress. Slots live as long as the pool, so that a worker that
// comes too late finds a slot of another region or of none, and never freed memory. Three words matter:
//   open    a bit for each slot that has lanes nobody took; what idle workers look at
//   ticket  of a slot: how many lanes there are, and the next to take. Taking one is a fetch_add
//   unfinished  of a slot: lanes that have not returned. Who holds a lane keeps it above 0, and so the slot
//               from being given to another region
// Sleeping workers are counted; who starts a region takes as many off the count as it needs and posts
// as many tokens, so that nobody is woken twice.
#include <espalier/thread_pool.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/parallel.h"

namespace espalier {
namespace {

using Clock = std::chrono::steady_clock;

// A region of a layer follows the last one after some microseconds, and a thread that sleeps takes 25 to 90
// to come back (2-core virtual machine; milliseconds when its host is busy). Looking for about as long as
// that costs at most as much again as sleeping at once would have.
constexpr std::chrono::microseconds kSpinTime{50};
// From then on others may have the core: what is waited for may be a thread that has none.
constexpr std::chrono::microseconds kSpinAloneTime{10};
// Some tenths of a microsecond, so that asking for the time (25 ns) is rare.
constexpr int kPausesPerLook = 16;
// Threads that one thread wakes, at up to 12 us a system call (the same machine). Those wake others in turn:
// hundreds are up after a few steps, and the caller has long begun to work.
constexpr int kWakesPerThread = 2;

constexpr int kNumSlots = 64;
constexpr int kLineBytes = 64;
constexpr uint32_t kCallerSleeps = uint32_t{1} << 31;  // in Slot::unfinished

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // waits for about as long as the other; `yield` does nothing on most cores
#endif
}

void FutexWait(std::atomic<uint32_t>& word, uint32_t value) {
  static_assert(sizeof(word) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void FutexWake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// True as soon as done() is, false when that took too long. Unless `alone`, which means that every thread can
// have a core of its own, it offers the core to others at every look: who is waited for may need this one.
template <typename Done>
bool Spin(bool alone, const Done& done) {
  if (done()) return true;
  const Clock::time_point begin = Clock::now();
  for (;;) {
    for (int i = 0; alone && i < kPausesPerLook; ++i) {
      Pause();
      if (done()) return true;
    }
    const Clock::duration spent = Clock::now() - begin;
    if (spent > kSpinTime) return done();
    if (!alone || spent > kSpinAloneTime) {
      sched_yield();
      if (done()) return true;
    }
  }
}

// How often this process is a child of the one that was started.
std::atomic<uint32_t> num_forks{0};
std::atomic<ThreadPool*> default_pool{nullptr};
// Those of the parents, which a leak checker should see.
std::atomic<ThreadPool*> inherited_pool{nullptr};

// Only what is allowed in a child of several threads: no locks, no memory.
void AfterForkInChild() {
  num_forks.fetch_add(1, std::memory_order_relaxed);
  ThreadPool* const pool = default_pool.exchange(nullptr, std::memory_order_relaxed);
  if (pool != nullptr) inherited_pool.store(pool, std::memory_order_relaxed);
}

[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, AfterForkInChild);

}  // namespace

class ThreadPool::Impl {
 public:
  using LaneFunction = void (*)(void* context, int lane);

  explicit Impl(ThreadPool* inherited = nullptr) : inherited_(inherited) {}
  ~Impl();

  // Starts threads until num_threads work on a region. The error of pthread_create, 0 = none.
  int Grow(int num_threads);
  int num_threads() const { return IsForked() ? 1 : num_workers_.load(std::memory_order_acquire) + 1; }
  void Run(int num_lanes, LaneFunction function, void* context);

 private:
  struct alignas(kLineBytes) Slot {
    std::atomic<uint64_t> ticket{0};  // lanes << 32 | next lane, which may be beyond
    std::atomic<LaneFunction> function{nullptr};
    std::atomic<void*> context{nullptr};
    alignas(kLineBytes) std::atomic<uint32_t> unfinished{0};
  };

  static bool HasLanes(uint64_t ticket) { return static_cast<uint32_t>(ticket) < ticket >> 32; }
  static void* ThreadMain(void* pool);

  // Made in a parent process: there are no workers, and words may be as they were in the middle of a region.
  bool IsForked() const { return forks_ != num_forks.load(std::memory_order_relaxed); }
  int TakeSlot();
  uint32_t RunLanes(int index, uint32_t first_own);
  void WaitForLanes(Slot& slot);
  void Work(int worker);
  bool HelpSomeone(int worker);
  bool SomeoneNeedsHelp() const;
  void Sleep();
  void WakeWorkers();
  int TakeSleepers(int wanted);
  void Post(int tokens);

  const uint32_t forks_ = num_forks.load(std::memory_order_relaxed);
  [[maybe_unused]] ThreadPool* const inherited_;
  std::mutex grow_mutex_;
  std::vector<pthread_t> threads_;  // under grow_mutex_
  int grow_error_ = 0;              // under grow_mutex_
  std::atomic<int> num_workers_{0};
  std::atomic<int> num_numbered_{0};
  // The threads of a region can all have a core.
  std::atomic<bool> cores_suffice_{true};

  alignas(kLineBytes) std::atomic<uint64_t> open_{0};
  std::atomic<bool> stop_{false};
  alignas(kLineBytes) std::atomic<uint64_t> taken_slots_{0};
  std::atomic<int> wanted_workers_{0};  // lanes of all regions in progress but those of their callers
  alignas(kLineBytes) std::atomic<int> num_sleepers_{0};
  alignas(kLineBytes) std::atomic<uint32_t> tokens_{0};
  std::array<Slot, kNumSlots> slots_;
};

ThreadPool::Impl::~Impl() {
  if (IsForked()) return;  // the threads are the parent's
  stop_.store(true);
  Post(TakeSleepers(kMaxThreads));
  for (const pthread_t thread : threads_) pthread_join(thread, nullptr);
}

int ThreadPool::Impl::Grow(int num_threads) {
  if (IsForked() || num_workers_.load(std::memory_order_acquire) + 1 >= num_threads) return 0;
  const std::lock_guard lock(grow_mutex_);
  // Asking again and again would cost every region the time that it takes to be refused.
  if (grow_error_ != 0) return grow_error_;
  cores_suffice_.store(num_threads <= HardwareThreads(), std::memory_order_relaxed);
  threads_.reserve(static_cast<size_t>(num_threads));
  // A program's handlers do not expect to run on threads that it does not know.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (static_cast<int>(threads_.size()) + 1 < num_threads) {
    pthread_t thread;
    grow_error_ = pthread_create(&thread, nullptr, &ThreadMain, this);
    if (grow_error_ != 0) break;
    pthread_setname_np(thread, "espalier");
    threads_.push_back(thread);
    num_workers_.store(static_cast<int>(threads_.size()), std::memory_order_release);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return grow_error_;
}

void* ThreadPool::Impl::ThreadMain(void* pool) {
  Impl* const self = static_cast<Impl*>(pool);
  self->Work(self->num_numbered_.fetch_add(1, std::memory_order_relaxed));
  return nullptr;
}

// -1 when all are taken.
int ThreadPool::Impl::TakeSlot() {
  uint64_t taken = taken_slots_.load(std::memory_order_relaxed);
  while (~taken != 0) {
    const int index = std::countr_one(taken);
    if (taken_slots_.compare_exchange_weak(taken, taken | uint64_t{1} << index, std::memory_order_acquire)) {
      return index;
    }
  }
  return -1;
}

void ThreadPool::Impl::Run(int num_lanes, LaneFunction function, void* context) {
  const int index = num_lanes <= 1 || num_threads() == 1 ? -1 : TakeSlot();
  if (index < 0) {
    for (int lane = 0; lane < num_lanes; ++lane) function(context, lane);
    return;
  }
  Slot& slot = slots_[static_cast<size_t>(index)];
  const int wanted = std::min(num_lanes - 1, num_workers_.load(std::memory_order_relaxed));
  wanted_workers_.fetch_add(wanted, std::memory_order_relaxed);
  slot.function.store(function, std::memory_order_relaxed);
  slot.context.store(context, std::memory_order_relaxed);
  slot.unfinished.store(static_cast<uint32_t>(num_lanes), std::memory_order_relaxed);
  // The bit comes first: who takes the last lane clears it, and must not be overtaken. Lane 0 is the
  // caller's.
  open_.fetch_or(uint64_t{1} << index);
  slot.ticket.store(uint64_t{static_cast<uint32_t>(num_lanes)} << 32 | 1);
  // A worker that goes to sleep counts itself first and looks at the ticket then; here it is the other way
  // round, all sequentially consistent: one of the two sees the other.
  WakeWorkers();
  function(context, 0);
  const uint32_t own = RunLanes(index, 1);
  if (slot.unfinished.fetch_sub(own, std::memory_order_acq_rel) != own) WaitForLanes(slot);
  wanted_workers_.fetch_sub(wanted, std::memory_order_relaxed);
  taken_slots_.fetch_and(~(uint64_t{1} << index), std::memory_order_release);
}

// Takes and runs lanes of a slot until none is left; `first_own` plus the number of them. Those still count
// as unfinished.
uint32_t ThreadPool::Impl::RunLanes(int index, uint32_t first_own) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  uint32_t own = first_own;
  while (HasLanes(slot.ticket.load(std::memory_order_relaxed))) {
    const uint64_t ticket = slot.ticket.fetch_add(1, std::memory_order_acquire);
    if (!HasLanes(ticket)) break;
    const uint32_t lane = static_cast<uint32_t>(ticket);
    if (lane + 1 == ticket >> 32) open_.fetch_and(~(uint64_t{1} << index), std::memory_order_relaxed);
    slot.function.load(std::memory_order_relaxed)(slot.context.load(std::memory_order_relaxed),
                                                  static_cast<int>(lane));
    ++own;
  }
  return own;
}

void ThreadPool::Impl::WaitForLanes(Slot& slot) {
  const auto done = [&] { return slot.unfinished.load(std::memory_order_acquire) == 0; };
  if (Spin(cores_suffice_.load(std::memory_order_relaxed), done)) return;
  uint32_t unfinished = slot.unfinished.load(std::memory_order_acquire);
  while ((unfinished & ~kCallerSleeps) != 0) {
    if ((unfinished & kCallerSleeps) == 0) {
      if (!slot.unfinished.compare_exchange_weak(unfinished, unfinished | kCallerSleeps,
                                                 std::memory_order_acq_rel)) {
        continue;
      }
      unfinished |= kCallerSleeps;
    }
    FutexWait(slot.unfinished, unfinished);
    unfinished = slot.unfinished.load(std::memory_order_acquire);
  }
}

void ThreadPool::Impl::Work(int worker) {
  while (!stop_.load(std::memory_order_relaxed)) {
    if (HelpSomeone(worker)) continue;
    const bool alone = cores_suffice_.load(std::memory_order_relaxed);
    if (Spin(alone, [&] { return SomeoneNeedsHelp() || stop_.load(std::memory_order_relaxed); })) continue;
    Sleep();
    if (SomeoneNeedsHelp()) WakeWorkers();
  }
}

// Runs lanes of one open slot; false when there is none. Workers begin their search at different slots.
bool ThreadPool::Impl::HelpSomeone(int worker) {
  const int first = worker % kNumSlots;
  for (uint64_t open = std::rotr(open_.load(std::memory_order_relaxed), first); open != 0; open &= open - 1) {
    const int index = (std::countr_zero(open) + first) % kNumSlots;
    const uint32_t own = RunLanes(index, 0);
    if (own == 0) continue;
    Slot& slot = slots_[static_cast<size_t>(index)];
    const uint32_t before = slot.unfinished.fetch_sub(own, std::memory_order_acq_rel);
    // The slot may belong to another region by now, whose caller then wakes for nothing.
    if (before == (own | kCallerSleeps)) FutexWake(slot.unfinished, 1);
    return true;
  }
  return false;
}

bool ThreadPool::Impl::SomeoneNeedsHelp() const {
  for (uint64_t open = open_.load(); open != 0; open &= open - 1) {
    if (HasLanes(slots_[static_cast<size_t>(std::countr_zero(open))].ticket.load())) return true;
  }
  return false;
}

// Returns with a token, or at once when there is something to do.
void ThreadPool::Impl::Sleep() {
  num_sleepers_.fetch_add(1);
  if ((SomeoneNeedsHelp() || stop_.load()) && TakeSleepers(1) == 1) return;
  // Counted, or taken off the count by somebody who has posted a token or is about to.
  for (;;) {
    uint32_t tokens = tokens_.load(std::memory_order_relaxed);
    while (tokens != 0) {
      if (tokens_.compare_exchange_weak(tokens, tokens - 1, std::memory_order_acquire)) return;
    }
    FutexWait(tokens_, 0);
  }
}

// Wakes as many as the regions in progress want beyond those who are up.
void ThreadPool::Impl::WakeWorkers() {
  const int sleepers = num_sleepers_.load();
  if (sleepers == 0) return;
  const int up = num_workers_.load(std::memory_order_relaxed) - sleepers;
  const int missing = wanted_workers_.load(std::memory_order_relaxed) - up;
  if (missing > 0) Post(TakeSleepers(std::min(missing, kWakesPerThread)));
}

// Takes up to `wanted` off the count of sleepers. Each wants a token, unless it is the taker itself.
int ThreadPool::Impl::TakeSleepers(int wanted) {
  int sleepers = num_sleepers_.load();
  for (;;) {
    const int taken = std::min(sleepers, wanted);
    if (taken == 0 || num_sleepers_.compare_exchange_weak(sleepers, sleepers - taken)) return taken;
  }
}

void ThreadPool::Impl::Post(int tokens) {
  if (tokens == 0) return;
  tokens_.fetch_add(static_cast<uint32_t>(tokens), std::memory_order_release);
  FutexWake(tokens_, tokens);
}

ThreadPool::ThreadPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ThreadPool::~ThreadPool() = default;

Result<std::shared_ptr<ThreadPool>> ThreadPool::Create(int num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    return Error(StatusCode::kUsage, fmt::format("a pool of {} threads; legal: 0 (all cores) to {}",
                                                 num_threads, int{kMaxThreads}));
  }
  if (num_threads == 0) num_threads = std::min(HardwareThreads(), kMaxThreads);
  std::shared_ptr<ThreadPool> pool(new ThreadPool(std::make_unique<Impl>()));
  if (const int error = pool->impl_->Grow(num_threads); error != 0) {
    return Error(StatusCode::kCapacity,
                 fmt::format("a pool of {} threads: the system refuses the one after {}: {}", num_threads,
                             pool->num_threads(), std::strerror(error)));
  }
  return pool;
}

ThreadPool& ThreadPool::Default(int num_threads) {
  if (num_threads <= 0) num_threads = HardwareThreads();
  ThreadPool* pool = default_pool.load(std::memory_order_acquire);
  if (pool == nullptr) {
    // A lock here could be held by another thread at a fork, and for ever in the child.
    auto* const made = new ThreadPool(std::make_unique<Impl>(inherited_pool.load(std::memory_order_relaxed)));
    if (default_pool.compare_exchange_strong(pool, made, std::memory_order_acq_rel)) {
      pool = made;
    } else {
      delete made;
    }
  }
  pool->impl_->Grow(std::min(num_threads, kMaxThreads));
  return *pool;
}

int ThreadPool::num_threads() const { return impl_->num_threads(); }

void ThreadPool::Run(int num_lanes, void (*function)(void* context, int lane), void* context) noexcept {
  impl_->Run(num_lanes, function, context);
}

}  // namespace espalier
