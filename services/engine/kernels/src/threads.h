// Parallel loops.
#pragma once

#include <cstdint>

// Calls body(context, i) for every i below count, in any order, on several threads. Within an item of
// another loop it calls them on this thread.
void parallel_for(int64_t count, void (*body)(void *, int64_t), void *context);

// Nanoseconds of work that are worth a second thread: to wake one takes about as long.
constexpr int64_t kLeastWork = 50'000;

// Returns the number of threads that a loop may use, 1 within an item of another.
int64_t num_threads();

// Returns whether this thread runs an item of a loop.
bool is_in_loop();

// parallel_for of a lambda. Internal linkage, because every instruction set compiles its own.
template <typename Body>
static inline void parallel_for(int64_t count, const Body &body) {
  parallel_for(
      count,
      [](void *context, int64_t i) { (*static_cast<const Body *>(context))(i); },
      const_cast<Body *>(&body));
}

// The same where a step may have little work. work: nanoseconds that one thread takes for all
// items, about. A loop of less than kLeastWork runs on this thread, which then waits for no other.
template <typename Body>
static inline void parallel_for(int64_t count, int64_t work, const Body &body) {
  if (work >= kLeastWork) return parallel_for(count, body);
  for (int64_t i = 0; i < count; i++) body(i);
}
