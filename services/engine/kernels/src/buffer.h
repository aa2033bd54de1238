// Memory that grows and is kept from call to call.
#pragma once

#include <stdlib.h>

#include <cstdint>

namespace {

class Buffer {
 public:
  ~Buffer() { free(data_); }

  // Aligned to a cache line.
  void *reserve(int64_t bytes) {
    if (bytes > capacity_) {
      free(data_);
      capacity_ = (bytes + 63) / 64 * 64;
      data_ = aligned_alloc(64, static_cast<size_t>(capacity_));
    }
    return data_;
  }

 private:
  void *data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace
