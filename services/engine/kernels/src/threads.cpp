// Parallel loops on a thread pool of their own, or on OpenMP's threads, which torch shares. A loop
// within an item of another runs on the item's thread alone.
//
// A step is some 200 short loops. OpenMP ends each with a barrier for all threads: if other
// services share the cores, one descheduled thread stalls every loop for milliseconds. The pool
// waits for no thread: those that run take the remaining items. If torch multiplies the matrices,
// its threads would compete with the pool's, so loops run on OpenMP's.
#include "threads.h"

#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "kernels.h"

#if defined(TW_X86_64)
#include <immintrin.h>
#endif

namespace {

inline void pause() {
#if defined(TW_X86_64)
  _mm_pause();
#endif
}

thread_local bool runs_item = false;

inline void run_item(void (*body)(void *, int64_t), void *context, int64_t i) {
  runs_item = true;
  body(context, i);
  runs_item = false;
}

// Condition variable of the system: waiting on std::condition_variable needs the libstdc++ of GCC 12.
class Condition {
 public:
  void wait(std::mutex &held) { pthread_cond_wait(&condition_, held.native_handle()); }
  void notify_all() { pthread_cond_broadcast(&condition_); }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

class Pool {
 public:
  void resize(int64_t threads) {
    std::lock_guard<std::mutex> lock(running_);
    threads_ = threads;
    for (; started_ < threads - 1; started_++)
      std::thread([this, index = started_] { work(index); }).detach();
  }

  int64_t threads() const { return threads_; }

  void run(int64_t count, void (*body)(void *, int64_t), void *context) {
    std::lock_guard<std::mutex> lock(running_);
    body_ = body;
    context_ = context;
    count_ = count;
    done_.store(0, std::memory_order_relaxed);
    // Publishes the fields above: before this store no thread can claim an item, since the last
    // loop left zero or less.
    left_.store(count);
    if (asleep_.load() > 0) {
      { std::lock_guard<std::mutex> wake(sleeping_); }
      awake_.notify_all();
    }
    claim();
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
      pause();
      if (spins > kSpins) std::this_thread::yield();
    }
  }

 private:
  // Some 20 microseconds: longer than the gaps within a step, far shorter than idle times.
  static constexpr int kSpins = 2000;

  void claim() {
    for (;;) {
      int64_t left = left_.fetch_sub(1);
      if (left <= 0) return;
      run_item(body_, context_, count_ - left);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void work(int64_t index) {
    for (int spins = 0;; spins++) {
      if (left_.load() > 0 && index < threads_ - 1) {
        claim();
        spins = 0;
      } else if (spins < kSpins) {
        pause();
      } else {
        std::lock_guard<std::mutex> lock(sleeping_);
        asleep_++;
        while (left_.load() <= 0) awake_.wait(sleeping_);
        asleep_--;
        spins = 0;
      }
    }
  }

  std::mutex running_;  // one loop at a time
  std::mutex sleeping_;
  Condition awake_;
  std::atomic<int64_t> asleep_{0};
  std::atomic<int64_t> threads_{0};
  int64_t started_ = 0;
  void (*body_)(void *, int64_t) = nullptr;
  void *context_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<int64_t> left_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

// Never destroyed: its threads run until the process ends.
Pool &pool = *new Pool;

}  // namespace

void tw_use_pool(int64_t threads) { pool.resize(threads); }

bool is_in_loop() { return runs_item; }

int64_t num_threads() {
  if (runs_item) return 1;
  return pool.threads() ? pool.threads() : omp_get_max_threads();
}

void parallel_for(int64_t count, void (*body)(void *, int64_t), void *context) {
  if (count == 1 || num_threads() == 1) {
    for (int64_t i = 0; i < count; i++) body(context, i);
  } else if (pool.threads()) {
    pool.run(count, body, context);
  } else {
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < count; i++) run_item(body, context, i);
  }
}
