// Huge pages for new CPU outputs. Stands alone: no Paddle.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace paddle_gated_ops {

constexpr int64_t kHugePage = int64_t(2) << 20;

// Asks the kernel for huge pages in memory that is about to be written from end to end. Large CPU tensors are fresh memory
// in each call, and the faults of its 4 KiB pages cost more than the work. Only whole huge pages inside the memory are asked
// for: nothing beyond it becomes resident. A hint: where huge pages are off or there are none, small ones come as ever.
// GATED_OPS_HUGE_PAGES=0 switches it off.
inline void AdviseHugePages(void* data, int64_t bytes) {
#ifdef __linux__
  static const bool wanted = [] {
    const char* text = std::getenv("GATED_OPS_HUGE_PAGES");
    return text == nullptr || std::strcmp(text, "0") != 0;
  }();
  if (!wanted || bytes < 2 * kHugePage) return;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace paddle_gated_ops
