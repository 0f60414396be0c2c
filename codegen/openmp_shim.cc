// Runs TVM's CPU kernels on the OpenMP threads that torch already has, with no TVM library in the process.
//
// A TVM kernel launches parallel loops and allocates work space through context symbols that libtvm_runtime would
// register.  This file is linked into every CPU artifact and registers them when the library is loaded.
// GOMP_parallel and omp_* stay undefined here: they resolve to the libgomp that torch has loaded, so there is one
// thread pool, and torch.set_num_threads holds for both.  A loop that one thread does is no parallel region at all.
#include <sched.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

extern "C" {
struct TVMParallelGroupEnv {
  void* sync_handle;
  int32_t num_task;
};
typedef int (*ParallelLambda)(int task_id, TVMParallelGroupEnv* env, void* closure);
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_max_threads();
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace {
struct Launch {
  ParallelLambda lambda;
  void* closure;
  int tasks;
  bool in_order;
  std::atomic<int> next, status;
};

void body(void* data) {
  auto* launch = static_cast<Launch*>(data);
  TVMParallelGroupEnv env{nullptr, launch->tasks};
  int task = launch->in_order ? launch->next++ : omp_get_thread_num();
  while (task < launch->tasks) {
    if (launch->lambda(task, &env, launch->closure) != 0) launch->status = -1;
    task = launch->in_order ? launch->next++ : task + omp_get_num_threads();
  }
}

thread_local int64_t limit = INT32_MAX;  // of threads, for the next launch
thread_local int pieces = 0;             // of the next launch, if threads take them in order

// tasks = 0 asks for one task a thread, as TVM's own pool does.
int parallel_launch(ParallelLambda lambda, void* closure, int tasks) {
  int threads = static_cast<int>(std::min<int64_t>(omp_get_max_threads(), limit));
  const bool in_order = pieces > 0;
  if (in_order && threads > 1)
    tasks = pieces;
  else if (tasks == 0)
    tasks = threads;
  limit = INT32_MAX;
  pieces = 0;
  threads = std::min(threads, tasks);
  if (threads == 1) {
    TVMParallelGroupEnv env{nullptr, tasks};
    for (int task = 0; task < tasks; ++task)
      if (lambda(task, &env, closure) != 0) return -1;
    return 0;
  }
  Launch launch{lambda, closure, tasks, in_order, {0}, {0}};
  GOMP_parallel(body, &launch, threads, 0);
  return launch.status;
}

// Room that a thread has given back and will ask for again: from the system it would come page by page, in every call.
struct Room {
  void* at = nullptr;
  uint64_t bytes = 0;
  bool taken = false;
};

struct Rooms {
  Room held[8];
  ~Rooms() {
    for (Room& room : held) std::free(room.at);
  }
};

thread_local Rooms rooms;

void* alloc_workspace(int, int, uint64_t bytes, int, int) {
  bytes = (bytes + 4095) / 4096 * 4096;
  Room* best = nullptr;  // the smallest that is large enough, or else the largest that is not taken
  for (Room& room : rooms.held) {
    if (room.taken) continue;
    const bool fits = room.bytes >= bytes, best_fits = best && best->bytes >= bytes;
    if (!best || (fits && !best_fits) || (fits == best_fits && (fits ? room.bytes < best->bytes : room.bytes > best->bytes)))
      best = &room;
  }
  if (!best) return std::aligned_alloc(4096, bytes);
  if (best->bytes < bytes) {
    std::free(best->at);
    best->at = std::aligned_alloc(4096, bytes);
    best->bytes = best->at ? bytes : 0;
  }
  best->taken = best->at != nullptr;
  return best->at;
}

int free_workspace(int, int, void* pointer) {
  for (Room& room : rooms.held)
    if (room.at == pointer) {
      room.taken = false;
      return 0;
    }
  std::free(pointer);
  return 0;
}

}  // namespace

// For the kernels beside which this is linked.
extern "C" {
#define HIDDEN __attribute__((visibility("hidden")))

// The next parallel loop of this thread has work for so many.
HIDDEN void qdsl_limit_threads(int64_t threads) { limit = std::max<int64_t>(threads, 1); }

// It has so many turns, each for the next thread that is free.
HIDDEN void qdsl_in_order(int64_t turns) { pieces = turns <= INT32_MAX ? static_cast<int>(turns) : 0; }

// Turns that come first count themselves, those after them wait until there are so many.
HIDDEN void qdsl_one_more(std::atomic<int64_t>* done) { done->fetch_add(1, std::memory_order_release); }

HIDDEN void qdsl_wait_for(std::atomic<int64_t>* done, int64_t count) {
  for (int turn = 1; done->load(std::memory_order_acquire) < count; ++turn)
    if (turn % 1024 == 0) sched_yield();  // its processor may be the one that the last of them waits for
}
}

namespace {
__attribute__((constructor)) void register_symbols() {
  TVMFFIEnvModRegisterContextSymbol("__TVMBackendParallelLaunch", reinterpret_cast<void*>(parallel_launch));
  TVMFFIEnvModRegisterContextSymbol("__TVMBackendAllocWorkspace", reinterpret_cast<void*>(alloc_workspace));
  TVMFFIEnvModRegisterContextSymbol("__TVMBackendFreeWorkspace", reinterpret_cast<void*>(free_workspace));
}
}  // namespace
