// SPDX-License-Identifier: Apache-2.0
//
// The threads that the library works on. A region is a number of lanes that run side by side; starting one
// costs about a microsecond while the threads are warm. Engines of one process share a pool or have one each
// (MoePlanOptions::pool).
#ifndef ESPALIER_THREAD_POOL_H_
#define ESPALIER_THREAD_POOL_H_

#include <espalier/status.h>

#include <memory>
#include <type_traits>

namespace espalier {

// May be used from any number of threads at once: their regions share the workers. Idle workers look for
// work for some tens of microseconds, then sleep until a region needs them.
//
// fork(): a child has none of its parent's workers. Pools made before the fork run everything on the calling
// thread there; Default() is a new pool. A fork from inside a region is for exec only.
class ThreadPool {
 public:
  static constexpr int kMaxThreads = 4096;

  // `num_threads` work on one region together, and the caller of Run is one of them, so num_threads - 1
  // are started; 0 = as many as the calling thread may use cores. They inherit its affinity and block all
  // signals. Errors: kUsage (not 0 to kMaxThreads), kCapacity (the system refuses a thread; none is left
  // behind).
  static Result<std::shared_ptr<ThreadPool>> Create(int num_threads);

  // The pool of everything that was given none. Made on first use, with at least num_threads threads (0 = as
  // many as the calling thread may use cores, at most kMaxThreads) after every call; where the system refuses
  // more it stays as it is, which costs speed and nothing else. Never destroyed: safe to use while the
  // process exits.
  static ThreadPool& Default(int num_threads = 0);

  // Waits for the threads to end. REQUIRES: no Run in progress; not called from inside a region.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The caller of Run included; 1 in a forked child.
  int num_threads() const;

  // Calls function(context, lane) for every lane in [0, num_lanes) exactly once, on at most num_threads()
  // threads at a time, and returns when all have returned. What happened before Run is visible to every lane,
  // what lanes did is visible after it. The caller takes lanes too, lane 0 first, and needs no other thread
  // to come to an end: lanes may call Run (of any pool), and a worker that is late or busy costs speed only.
  // Lanes must not wait for each other. A function that throws ends the program. Never allocates.
  void Run(int num_lanes, void (*function)(void* context, int lane), void* context) noexcept;

  // The same with a callable f(lane).
  template <typename Function>
  void Run(int num_lanes, Function&& function) noexcept {
    using Pointer = std::remove_reference_t<Function>*;
    Run(
        num_lanes, [](void* context, int lane) { (*static_cast<Pointer>(context))(lane); },
        const_cast<void*>(static_cast<const void*>(&function)));
  }

 private:
  class Impl;
  explicit ThreadPool(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace espalier

#endif  // ESPALIER_THREAD_POOL_H_
