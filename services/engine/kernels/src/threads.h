// Parallel loops.
#pragma once

#include <cstdint>

// Calls body(context, i) for every i below count, in any order, on several threads. Within an item of
// another loop it calls them on this thread.
void parallel_for(int64_t count, void (*body)(void *, int64_t), void *context);

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
