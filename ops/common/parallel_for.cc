#include "common/parallel_for.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#include "common/fp_environment.h"

namespace paddle_gated_ops {
namespace {

// Waking a thread costs about 10 us, in which one core moves some 100 KiB.
constexpr int64_t kBytesPerThread = int64_t(512) << 10;

// The first number of a variable such as "8" or "4,2"; 0 where there is none.
int NumberFromEnvironment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : int(std::clamp(std::strtol(text, nullptr, 10), 0L, 1024L));
}

int DefaultNumThreads() {
  for (const char* name : {"GATED_OPS_NUM_THREADS", "OMP_NUM_THREADS"}) {
    if (const int count = NumberFromEnvironment(name)) return count;
  }
  return std::max(1, int(std::thread::hardware_concurrency()));
}

std::atomic<int> g_num_threads{0};  // 0: not set

struct Job {
  const std::function<void(int64_t)>& body;
  const int64_t tasks;
  std::atomic<int64_t> next{0};

  void Work() {
    const DefaultFpEnvironment environment;
    for (int64_t task = next++; task < tasks; task = next++) body(task);
  }
};

class ThreadPool {
 public:
  void Run(Job* job, int threads) {
    std::unique_lock<std::mutex> running(running_, std::try_to_lock);
    if (!running) return job->Work();
    StartWorkers(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      seats_ = threads - 1;
    }
    wake_.notify_all();
    job->Work();
    std::unique_lock<std::mutex> lock(mutex_);
    seats_ = 0;  // nobody else may join: the job lives on this stack
    left_.wait(lock, [this] { return seated_ == 0; });
  }

 private:
  void StartWorkers(int count) {
    while (workers_ < count) {
      try {
        std::thread([this] { WorkForever(); }).detach();
      } catch (const std::system_error&) {
        return;  // no more threads to be had: the caller does the work
      }
      ++workers_;
    }
  }

  void WorkForever() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return seats_ > 0; });
      --seats_;
      ++seated_;
      Job* job = job_;
      lock.unlock();
      job->Work();
      lock.lock();
      if (--seated_ == 0) left_.notify_one();
    }
  }

  std::mutex running_;  // held by the one caller that the pool works for
  int workers_ = 0;     // guarded by running_
  std::mutex mutex_;
  std::condition_variable wake_, left_;
  Job* job_ = nullptr;  // these three guarded by mutex_
  int seats_ = 0;       // how many more workers may join the job
  int seated_ = 0;      // how many are at it
};

// Never destroyed: its threads wait in it until the process ends.
std::atomic<ThreadPool*> g_pool{nullptr};

// A forked child has none of its parent's threads, and perhaps a locked mutex: it gets a pool of its own.
const int g_registered = pthread_atfork(nullptr, nullptr, [] { g_pool = nullptr; });

ThreadPool& Pool() {
  ThreadPool* pool = g_pool;
  if (pool == nullptr) {
    ThreadPool* fresh = new ThreadPool;
    if (g_pool.compare_exchange_strong(pool, fresh)) return *fresh;
    delete fresh;  // another thread was faster
  }
  return *pool;
}

}  // namespace

int NumThreads() {
  static const int by_default = DefaultNumThreads();
  const int set = g_num_threads;
  return set > 0 ? set : by_default;
}

void SetNumThreads(int count) { g_num_threads = count; }

void ParallelFor(int64_t tasks, int64_t bytes, const std::function<void(int64_t)>& body) {
  const int64_t useful = std::min(tasks, bytes / kBytesPerThread);
  const int threads = int(std::min<int64_t>(NumThreads(), useful));
  Job job{body, tasks};
  if (threads <= 1) return job.Work();
  Pool().Run(&job, threads);
}

}  // namespace paddle_gated_ops
