// Scratch memory that grows and persists between calls.
#pragma once

#include <stdlib.h>

#include <cstdint>

namespace {

class Buffer {
 public:
  ~Buffer() { free(data_); }

  // Returns at least `bytes`, aligned to a cache line. Growing discards the content.
  void *reserve(int64_t bytes) {
    if (bytes > capacity_) {
      free(data_);
      capacity_ = (bytes + 63) / 64 * 64;
      data_ = aligned_alloc(64, static_cast<size_t>(capacity_));
    }
    return data_;
  }

  const void *data() const { return data_; }

 private:
  void *data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace
