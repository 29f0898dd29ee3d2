// A thread pool for the CPU kernels: fixed tasks, whoever runs them. Stands alone: no Paddle.
//
// Not OpenMP: once a parallel region has run, libgomp hangs in a forked child (a DataLoader worker, say). This pool
// starts anew there. Results never depend on the number of threads, as the tasks are the caller's and fixed.
#pragma once

#include <cstdint>
#include <functional>

namespace paddle_gated_ops {

// The number set, else GATED_OPS_NUM_THREADS, else OMP_NUM_THREADS, else the machine's.
int NumThreads();
void SetNumThreads(int count);  // at least 1

// Calls body(task) once for each task in [0, tasks), on up to NumThreads() threads, and returns when all are done.
// `bytes` is the traffic of all tasks together: small work stays on the calling thread. The body must not throw. It runs
// in the default floating-point mode, whatever the threads' own is.
// A caller that finds the pool busy (with another Python thread's call) does its tasks itself.
void ParallelFor(int64_t tasks, int64_t bytes, const std::function<void(int64_t)>& body);

}  // namespace paddle_gated_ops
