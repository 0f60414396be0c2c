// A GPU in one thread: what a generated kernel needs of CUDA, run on the host, so that kernels can be tested without a GPU.
//
// A CUDA thread is a fiber; fibers take turns in a fixed order and give way where they wait. Instructions of a warp or a
// warpgroup are computed when the last of its threads has come. Asynchronous copies are done at once, so a missing wait does
// not show; a wrong address, layout, count of bytes or phase does. Shared memory begins as NaN.
//
// Every source includes this; `simt.cc` is compiled once, and optimized, which generated sources are not.
#pragma once
#include <bit>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace simt {

void require(bool held, const char* what);  // or else the launch fails

struct Meeting {  // of a number of threads: the last one does the work for all
  int come = 0;
  uint64_t times = 0;
};

struct Warp {
  Meeting meeting;
  uint32_t address[32], a[32][4], b[32][2], value[32], source[32];
  float c[32][4], *d[32][4];
  uint32_t* r[32][4];
};

struct Warpgroup {
  Meeting meeting;
  uint32_t a[128][4];
  float** d[128];
  uint64_t matrix[128];
};

struct Cluster;

struct Cta {
  std::vector<char> memory;
  char* shared;
  int rank, threads;
  dim3 index;
  Cluster* cluster;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  Meeting barriers[16];
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  int alive = 0, arrived = 0;
  uint64_t times = 0;
  void release() {
    if (alive > 0 && arrived >= alive) arrived = 0, ++times;
  }
};

struct Fiber {
  ucontext_t start;
  jmp_buf left;  // where it gave way
  bool begun = false;
  dim3 thread;
  int number;
  Cta* cta;
  bool done = false;
  uint64_t cluster_times = 0;
  int lane() const { return number % 32; }
  Warp& warp() { return cta->warps[number / 32]; }
};

extern Fiber* now;  // the thread that runs

cudaError_t launch(const cudaLaunchConfig_t* config, std::function<void()> kernel);
CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* extents,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Bits and halves.
uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, int table);
uint32_t permute(uint32_t a, uint32_t b, uint32_t selector);
uint32_t fma2(uint32_t a, uint32_t b, uint32_t c, bool bf16);
uint32_t extreme2(uint32_t a, uint32_t b, bool bf16, float (*of)(float, float));  // NaN if either is
uint32_t pack(float high, float low, bool bf16);
uint32_t halves_e4m3(uint16_t pair), halves_e5m2(uint16_t pair);
uint16_t small_e4m3(float value), small_e5m2(float value);
double value_s8(uint8_t byte), value_e4m3(uint8_t byte), value_e5m2(uint8_t byte);

// Of a warp, and of a warpgroup.
void sync_warp();
uint32_t shuffle(uint32_t value, uint32_t source);
void load_matrices(int count, uint32_t** r, uint32_t address);
void store_matrices(int count, uint32_t address, const uint32_t* r, bool transposed);
void mma(bool bf16, float** d, const uint32_t* a, const uint32_t* b, const float* c);
void mma_bytes(double (*value)(uint8_t), void** d, const uint32_t* a, const uint32_t* b, const uint32_t* c);
void wgmma(int tokens, bool bf16, float** d, const uint32_t* a, uint64_t descriptor, uint32_t add);
void wgmma_bytes(int columns, double (*value)(uint8_t), void** d, const uint32_t* a, uint64_t matrix, uint64_t descriptor,
                 uint32_t add);

// Barriers.
void barrier(int name, int threads);
void cluster_arrive();
void cluster_wait();
void mbarrier_init(uint32_t address, uint32_t count);
void mbarrier_arrive(uint32_t address, int32_t bytes = 0);
void mbarrier_wait(uint32_t address, uint32_t parity);

// Shared memory.
uint32_t shared_address(const void* p);
char* at(uint32_t address);
void copy_async(uint32_t target, const void* source, int size, uint32_t given);
void load_bytes(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier);
void load_box(uint32_t target, const void* tensor_map, std::initializer_list<int> corner, uint32_t barrier);
inline char* shared_memory() { return now->cta->shared; }

template <typename T>
T load(uint32_t address) {
  require(address % sizeof(T) == 0, "an aligned load");
  T value;
  std::memcpy(&value, at(address), sizeof(T));
  return value;
}

template <typename T, typename... Values>
void load_all(uint32_t address, Values&... values) {
  require(address % (sizeof(T) * sizeof...(values)) == 0, "an aligned vector load");
  int i = 0;
  ((std::memcpy(&values, at(address + sizeof(T) * i++), sizeof(T))), ...);
}

template <typename... Values>
void store_all(char* target, Values... values) {
  require(reinterpret_cast<uintptr_t>(target) % (4 * sizeof...(values)) == 0, "an aligned vector store");
  int i = 0;
  ((std::memcpy(target + 4 * i++, &values, 4)), ...);
}

}  // namespace simt

// What CUDA has of min and max for every type of numbers.
#define SIMT_LEAST(T)                                       \
  inline T min(T a, T b) { return b < a ? b : a; }          \
  inline T max(T a, T b) { return a < b ? b : a; }
SIMT_LEAST(int)
SIMT_LEAST(unsigned)
SIMT_LEAST(long)
SIMT_LEAST(long long)
SIMT_LEAST(float)
SIMT_LEAST(double)
