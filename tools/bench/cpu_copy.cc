// The limit of a CPU: a copy on a thread pool of the kernels' own kind. tools/bench/copy.py builds and calls it.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/parallel_for.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

constexpr int64_t kTaskBytes = int64_t(256) << 10;

// Stores past the caches: no line is read to be overwritten. `to` is 16-byte aligned.
void CopyStreaming(const char* from, char* to, int64_t bytes) {
#ifdef __SSE2__
  const int64_t whole = bytes / 64 * 64;
  for (int64_t i = 0; i < whole; i += 64) {
    for (int k = 0; k < 64; k += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + k),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + k)));
    }
  }
  _mm_sfence();
  std::memcpy(to + whole, from + whole, bytes - whole);
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace

extern "C" void Copy(const char* from, char* to, int64_t bytes, int threads, int streaming) {
  paddle_gated_ops::SetNumThreads(threads);
  paddle_gated_ops::ParallelFor((bytes + kTaskBytes - 1) / kTaskBytes, 2 * bytes, [&](int64_t task) {
    const int64_t begin = task * kTaskBytes, count = std::min(kTaskBytes, bytes - begin);
    if (streaming) {
      CopyStreaming(from + begin, to + begin, count);
    } else {
      std::memcpy(to + begin, from + begin, count);
    }
  });
}
