// The instructions of `simt.h`.
#include "simt.h"

namespace simt {

Fiber* now = nullptr;

namespace {

constexpr size_t STACK = 1 << 20;  // of which a kernel touches little

jmp_buf scheduler;
const char* failure = nullptr;
std::function<void()> body;
uint64_t waits = 0;
std::vector<std::unique_ptr<char[]>> stacks;  // one for each thread of the largest cluster so far

// Fibers begin with setcontext, which makes their stacks, and go on with longjmp, which asks the system for nothing.
__attribute__((noinline)) void leave() {
  if (!_setjmp(now->left)) _longjmp(scheduler, 1);
}

__attribute__((noinline)) void resume(Fiber& fiber) {
  now = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.left, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}

}  // namespace

void require(bool held, const char* what) {
  if (held) return;
  if (!now) throw std::runtime_error(what);
  failure = what;
  leave();  // and never back
}

namespace {

void give_way() {
  require(++waits < 20'000'000, "an end of waiting");
  leave();
}

template <typename Work>
void meet(Meeting& meeting, int size, const Work& work) {
  if (++meeting.come == size) {
    work();
    meeting.come = 0;
    ++meeting.times;
    return;
  }
  for (uint64_t before = meeting.times; meeting.times == before;) give_way();
}

void fiber_main() {
  body();
  now->done = true;
  Cluster* cluster = now->cta->cluster;
  --cluster->alive;
  cluster->release();
  leave();
}

void run(Cluster& cluster, int threads) {
  std::vector<std::unique_ptr<Fiber>> fibers;
  for (auto& cta : cluster.ctas) {
    for (int t = 0; t < threads; ++t) {
      auto fiber = std::make_unique<Fiber>();
      if (stacks.size() == fibers.size()) stacks.emplace_back(new char[STACK]);
      fiber->thread = dim3(t, 0, 0);
      fiber->number = t;
      fiber->cta = cta.get();
      getcontext(&fiber->start);
      fiber->start.uc_stack.ss_sp = stacks[fibers.size()].get();
      fiber->start.uc_stack.ss_size = STACK;
      fiber->start.uc_link = nullptr;
      makecontext(&fiber->start, fiber_main, 0);
      fibers.push_back(std::move(fiber));
    }
  }
  cluster.alive = int(fibers.size());
  for (bool left = true; left;) {
    left = false;
    for (auto& fiber : fibers) {
      if (fiber->done) continue;
      resume(*fiber);
      if (failure) {
        std::string text = "thread " + std::to_string(now->number) + ": not " + failure;
        now = nullptr, failure = nullptr;
        throw std::runtime_error(text);
      }
      left = true;
    }
  }
  now = nullptr;
}

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t* config, std::function<void()> kernel) {
  int size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) size = config->attrs[i].val.clusterDim.x;
  require(config->gridDim.x % size == 0, "a grid of whole clusters");
  require(config->dynamicSmemBytes <= 227 * 1024, "227 KB of shared memory");
  body = kernel;
  waits = 0;
  int threads = config->blockDim.x;
  for (unsigned first = 0; first < config->gridDim.x; first += size) {
    Cluster cluster;
    for (int rank = 0; rank < size; ++rank) {
      auto cta = std::make_unique<Cta>();
      cta->memory.assign(config->dynamicSmemBytes + 1024, char(0xFF));
      cta->shared = cta->memory.data() + (1024 - reinterpret_cast<uintptr_t>(cta->memory.data()) % 1024) % 1024;
      cta->rank = rank, cta->threads = threads, cta->index = dim3(first + rank, 0, 0), cta->cluster = &cluster;
      cta->warps.resize(threads / 32);
      cta->warpgroups.resize((threads + 127) / 128);
      cluster.ctas.push_back(std::move(cta));
    }
    run(cluster, threads);
  }
  return cudaSuccess;
}

// ---- memory -------------------------------------------------------------------------------------------------------
uint32_t shared_address(const void* p) {
  ptrdiff_t at = static_cast<const char*>(p) - shared_memory();
  require(at >= 0 && at < 1 << 24, "an address in shared memory");  // what is not used may lie outside of it
  return uint32_t(at);
}

char* at(uint32_t address) {  // bits from 24 on: one more than the rank in the cluster, or 0 for one's own
  Cta* cta = address >> 24 ? now->cta->cluster->ctas[(address >> 24) - 1].get() : now->cta;
  require((address & 0xFFFFFF) + 16 <= cta->memory.size(), "an address inside of shared memory");
  return cta->shared + (address & 0xFFFFFF);
}

void copy_async(uint32_t target, const void* source, int size, uint32_t given) {
  require(target % size == 0, "an aligned copy to shared memory");
  require(given == 0 || reinterpret_cast<uintptr_t>(source) % size == 0, "an aligned copy from global memory");
  std::memset(at(target), 0, size);
  if (given) std::memcpy(at(target), source, given);
}

// ---- bits and halves ----------------------------------------------------------------------------------------------
uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, int table) {
  uint32_t found = 0;
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1) found |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return found;
}

uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) {
    int s = selector >> 4 * i & 15;
    uint32_t byte = bytes >> 8 * (s & 7) & 255;
    found |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return found;
}

float half_value(uint16_t bits, bool bf16) {
  if (bf16) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}

uint16_t half_bits(float value, bool bf16) {
  if (bf16) return __nv_bfloat16_raw(__float2bfloat16_rn(value)).x;
  return __half_raw(__float2half_rn(value)).x;
}

uint16_t half_bits(double value, bool bf16) {  // rounded once
  float nearest = float(value);
  if (double(nearest) != value && value == value) {  // to odd, so that the second rounding is the only one
    uint32_t bits;
    std::memcpy(&bits, &nearest, 4);
    bool above = (double(nearest) > value) == (value > 0);
    if (above) --bits;
    bits |= 1;
    std::memcpy(&nearest, &bits, 4);
  }
  return half_bits(nearest, bf16);
}

uint32_t fma2(uint32_t a, uint32_t b, uint32_t c, bool bf16) {
  uint32_t found = 0;
  for (int p = 0; p < 2; ++p) {
    auto value = [&](uint32_t word) { return double(half_value(word >> 16 * p & 0xFFFF, bf16)); };
    found |= uint32_t(half_bits(value(a) * value(b) + value(c), bf16)) << 16 * p;
  }
  return found;
}

uint32_t extreme2(uint32_t a, uint32_t b, bool bf16, float (*of)(float, float)) {
  uint32_t found = 0;
  for (int p = 0; p < 2; ++p) {
    float one = half_value(a >> 16 * p & 0xFFFF, bf16), other = half_value(b >> 16 * p & 0xFFFF, bf16);
    found |= uint32_t(half_bits(std::isnan(one) || std::isnan(other) ? NAN : of(one, other), bf16)) << 16 * p;
  }
  return found;
}

uint32_t pack(float high, float low, bool bf16) {
  return uint32_t(half_bits(high, bf16)) << 16 | half_bits(low, bf16);
}

// Two 8-bit floats as f16, which has all their values: e5m2 is its upper half.
uint32_t halves_e5m2(uint16_t pair) { return uint32_t(pair & 0xFF) << 8 | uint32_t(pair >> 8) << 24; }

double value_s8(uint8_t byte) { return int8_t(byte); }
double value_e5m2(uint8_t byte) { return half_value(byte << 8, false); }
double value_e4m3(uint8_t byte) {
  int exponent = byte >> 3 & 15, mantissa = byte & 7;
  double value = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
  if ((byte & 0x7F) == 0x7F) value = NAN;
  return byte & 0x80 ? -value : value;
}
uint32_t halves_e4m3(uint16_t pair) { return pack(value_e4m3(pair >> 8), value_e4m3(pair & 0xFF), false); }

// The nearest finite number of a sign, an exponent with this bias, and a mantissa of so many bits; ties to even.
uint16_t small(float value, int mantissa, int bias, float largest) {
  if (std::isnan(value)) return 0x7F;
  float size = std::min(std::fabs(value), largest);
  int exponent = size ? std::max(std::ilogb(size), 1 - bias) : 1 - bias;
  int code = std::nearbyint(std::ldexp(size, mantissa - exponent));  // carries into the exponent
  return (std::signbit(value) << 7) | (code + (exponent + bias - 1 << mantissa));
}
uint16_t small_e4m3(float value) { return small(value, 3, 7, 448); }
uint16_t small_e5m2(float value) { return small(value, 2, 15, 57344); }

// ---- a warp at once -----------------------------------------------------------------------------------------------
void sync_warp() { meet(now->warp().meeting, 32, [] {}); }

uint32_t shuffle(uint32_t value, uint32_t source) {
  Warp& warp = now->warp();
  int lane = now->lane();
  warp.value[lane] = value, warp.source[lane] = source;
  meet(warp.meeting, 32, [&] {
    for (int l = 0; l < 32; ++l) warp.address[l] = warp.value[warp.source[l] % 32];
  });
  uint32_t result = warp.address[lane];
  sync_warp();
  return result;
}

void load_matrices(int count, uint32_t** r, uint32_t address) {
  Warp& warp = now->warp();
  int lane = now->lane();
  warp.address[lane] = address;
  for (int i = 0; i < count; ++i) warp.r[lane][i] = r[i];
  meet(warp.meeting, 32, [&] {
    for (int i = 0; i < count; ++i)
      for (int l = 0; l < 32; ++l) {
        uint32_t row = warp.address[8 * i + l / 4];
        require(row % 16 == 0, "rows of matrices on 16 bytes");
        std::memcpy(warp.r[l][i], at(row) + 4 * (l % 4), 4);
      }
  });
}

void store_matrices(int count, uint32_t address, const uint32_t* r, bool transposed) {
  Warp& warp = now->warp();
  int lane = now->lane();
  warp.address[lane] = address;
  for (int i = 0; i < count; ++i) warp.a[lane][i] = r[i];
  meet(warp.meeting, 32, [&] {
    for (int i = 0; i < count; ++i)
      for (int l = 0; l < 32; ++l)
        for (int p = 0; p < 2; ++p) {
          uint16_t half = warp.a[l][i] >> 16 * p;
          int row = l / 4, column = l % 4 * 2 + p;
          if (transposed) std::swap(row, column);
          std::memcpy(at(warp.address[8 * i + row]) + 2 * column, &half, 2);
        }
  });
}

// A row of A, 16 numbers, out of the fragments of a warp: row r, lane 4 (r % 8) + t has k = 2t + p and 8 + 2t + p.
void row_of_a(const uint32_t (*a)[4], int row, bool bf16, double* numbers) {
  for (int t = 0; t < 4; ++t)
    for (int h = 0; h < 2; ++h)
      for (int p = 0; p < 2; ++p)
        numbers[8 * h + 2 * t + p] = half_value(a[4 * (row % 8) + t][2 * h + row / 8] >> 16 * p & 0xFFFF, bf16);
}

void mma(bool bf16, float** d, const uint32_t* a, const uint32_t* b, const float* c) {
  Warp& warp = now->warp();
  int lane = now->lane();
  for (int i = 0; i < 4; ++i) warp.a[lane][i] = a[i], warp.c[lane][i] = c[i], warp.d[lane][i] = d[i];
  for (int i = 0; i < 2; ++i) warp.b[lane][i] = b[i];
  meet(warp.meeting, 32, [&] {
    for (int row = 0; row < 16; ++row) {
      double numbers[16];
      row_of_a(warp.a, row, bf16, numbers);
      for (int column = 0; column < 8; ++column) {
        double sum = 0;
        for (int k = 0; k < 16; ++k) {
          uint32_t word = warp.b[4 * column + k % 8 / 2][k / 8];
          sum += numbers[k] * half_value(word >> 16 * (k % 2) & 0xFFFF, bf16);
        }
        int l = 4 * (row % 8) + column / 2, i = 2 * (row / 8) + column % 2;
        *warp.d[l][i] = float(warp.c[l][i] + sum);
      }
    }
  });
}

// Of bytes, 32 of k; c and d are int32 or float, as the values are.
void mma_bytes(double (*value)(uint8_t), void** d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  Warp& warp = now->warp();
  int lane = now->lane();
  for (int i = 0; i < 4; ++i)
    warp.a[lane][i] = a[i], warp.c[lane][i] = std::bit_cast<float>(c[i]), warp.d[lane][i] = static_cast<float*>(d[i]);
  for (int i = 0; i < 2; ++i) warp.b[lane][i] = b[i];
  meet(warp.meeting, 32, [&] {
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 8; ++column) {
        double sum = 0;
        for (int k = 0; k < 32; ++k) {
          uint8_t one = warp.a[4 * (row % 8) + k % 16 / 4][k / 16 * 2 + row / 8] >> 8 * (k % 4);
          uint8_t other = warp.b[4 * column + k % 16 / 4][k / 16] >> 8 * (k % 4);
          sum += value(one) * value(other);
        }
        int l = 4 * (row % 8) + column / 2, i = 2 * (row / 8) + column % 2;
        float before = warp.c[l][i];
        if (value == value_s8) *reinterpret_cast<int32_t*>(warp.d[l][i]) = std::bit_cast<int32_t>(before) + int32_t(sum);
        else *warp.d[l][i] = float(before + sum);
      }
  });
}

// ---- a warpgroup at once ------------------------------------------------------------------------------------------
void wgmma(int tokens, bool bf16, float** d, const uint32_t* a, uint64_t descriptor, uint32_t add) {
  Warpgroup& group = now->cta->warpgroups[now->number / 128];
  int thread = now->number % 128;
  for (int i = 0; i < 4; ++i) group.a[thread][i] = a[i];
  group.d[thread] = d;
  meet(group.meeting, 128, [&] {
    uint32_t start = (descriptor & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4;
    require(descriptor >> 62 == 1, "tokens swizzled within 128 bytes");
    std::vector<double> b(tokens * 16);
    for (int n = 0; n < tokens; ++n)
      for (int k = 0; k < 16; ++k) {
        uint32_t address = start + n / 8 * stride + n % 8 * 128 + 2 * k;
        uint16_t bits;
        std::memcpy(&bits, at(address ^ (address >> 7 & 7) << 4), 2);
        b[16 * n + k] = half_value(bits, bf16);
      }
    for (int row = 0; row < 64; ++row) {
      double numbers[16];
      row_of_a(group.a + row / 16 * 32, row % 16, bf16, numbers);
      for (int n = 0; n < tokens; ++n) {
        double sum = 0;
        for (int k = 0; k < 16; ++k) sum += numbers[k] * b[16 * n + k];
        float& target = *group.d[row / 16 * 32 + 4 * (row % 8) + n % 8 / 2][n / 8 * 4 + row % 16 / 8 * 2 + n % 2];
        target = float((add ? double(target) : 0.0) + sum);
      }
    }
  });
}

// Byte k of a row of a matrix in shared memory: within 128 bytes, swizzled, or in matrices of 8 rows by 16 bytes.
static uint8_t byte_of(uint64_t descriptor, int row, int k) {
  uint32_t start = (descriptor & 0x3FFF) << 4, along_rows = (descriptor >> 32 & 0x3FFF) << 4;
  if (descriptor >> 62 == 0) {
    uint32_t along_k = (descriptor >> 16 & 0x3FFF) << 4;
    return *reinterpret_cast<uint8_t*>(at(start + row / 8 * along_rows + k / 16 * along_k + row % 8 * 16 + k % 16));
  }
  require(descriptor >> 62 == 1, "no swizzle, or one within 128 bytes");
  uint32_t address = start + row / 8 * along_rows + row % 8 * 128 + k;
  return *reinterpret_cast<uint8_t*>(at(address ^ (address >> 7 & 7) << 4));
}

// Of bytes, 32 of k; d are int32 or float, as the values are. A is in registers, or (without them) a matrix in shared memory.
void wgmma_bytes(int columns, double (*value)(uint8_t), void** d, const uint32_t* a, uint64_t matrix, uint64_t descriptor,
                        uint32_t add) {
  Warpgroup& group = now->cta->warpgroups[now->number / 128];
  int thread = now->number % 128;
  for (int i = 0; a && i < 4; ++i) group.a[thread][i] = a[i];
  group.d[thread] = reinterpret_cast<float**>(d);
  group.matrix[thread] = matrix;
  meet(group.meeting, 128, [&] {
    for (uint64_t other : group.matrix) require(other == matrix, "one matrix for all of a warpgroup");
    std::vector<double> b(columns * 32);
    for (int n = 0; n < columns; ++n)
      for (int k = 0; k < 32; ++k) b[32 * n + k] = value(byte_of(descriptor, n, k));
    for (int row = 0; row < 64; ++row) {
      double numbers[32];
      for (int k = 0; k < 32; ++k) {
        const uint32_t* fragment = group.a[row / 16 * 32 + 4 * (row % 8) + k % 16 / 4];
        numbers[k] = value(a ? fragment[k / 16 * 2 + row % 16 / 8] >> 8 * (k % 4) : byte_of(matrix, row, k));
      }
      for (int n = 0; n < columns; ++n) {
        double sum = 0;
        for (int k = 0; k < 32; ++k) sum += numbers[k] * b[32 * n + k];
        void* target = group.d[row / 16 * 32 + 4 * (row % 8) + n % 8 / 2][n / 8 * 4 + row % 16 / 8 * 2 + n % 2];
        if (value == value_s8) {
          int32_t& total = *static_cast<int32_t*>(target);
          total = (add ? total : 0) + int32_t(sum);
        } else {
          float& total = *static_cast<float*>(target);
          total = float((add ? double(total) : 0.0) + sum);
        }
      }
    }
  });
}

// ---- barriers -----------------------------------------------------------------------------------------------------
void barrier(int name, int threads) { meet(now->cta->barriers[name], threads, [] {}); }

void cluster_arrive() {
  Cluster& cluster = *now->cta->cluster;
  now->cluster_times = cluster.times;
  ++cluster.arrived;
  cluster.release();
}

void cluster_wait() {
  while (now->cta->cluster->times == now->cluster_times) give_way();
}

struct MBarrier {
  uint16_t expected, pending;
  uint32_t phase : 1;
  int32_t bytes : 31;
  void done() {
    if (pending == 0 && bytes == 0) phase ^= 1, pending = expected;
  }
};

MBarrier& mbarrier(uint32_t address) { return *reinterpret_cast<MBarrier*>(at(address)); }

void mbarrier_init(uint32_t address, uint32_t count) {
  mbarrier(address) = MBarrier{uint16_t(count), uint16_t(count), 0, 0};
}

void mbarrier_arrive(uint32_t address, int32_t bytes) {
  MBarrier& barrier = mbarrier(address);
  require(barrier.pending > 0, "no more arrivals at a barrier than it expects");
  barrier.bytes += bytes;
  --barrier.pending;
  barrier.done();
}

void mbarrier_wait(uint32_t address, uint32_t parity) {
  while (mbarrier(address).phase == (parity & 1)) give_way();
}

// ---- tensor maps --------------------------------------------------------------------------------------------------
struct Map {
  char* base;
  uint64_t extents[4], strides[3];
  uint32_t rank, size, box[4], swizzle;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* extents,
                       const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Map& found = *reinterpret_cast<Map*>(map);
  found.base = static_cast<char*>(base), found.rank = rank, found.swizzle = swizzle;
  found.size = type == CU_TENSOR_MAP_DATA_TYPE_UINT32 ? 4 : 2;
  for (unsigned i = 0; i < rank; ++i) {
    found.extents[i] = extents[i], found.box[i] = box[i];
    require(box[i] >= 1 && box[i] <= 256, "boxes of 1 to 256 numbers");
    if (i + 1 < rank) {
      found.strides[i] = strides[i];
      require(strides[i] % 16 == 0, "strides of tensor maps of 16 bytes");
    }
  }
  require(reinterpret_cast<uintptr_t>(base) % 16 == 0, "tensors of tensor maps on 16 bytes");
  require(swizzle != CU_TENSOR_MAP_SWIZZLE_128B || box[0] * found.size <= 128, "swizzled rows of 128 bytes at most");
  return CUDA_SUCCESS;
}

void load_bytes(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  require(target % 16 == 0 && reinterpret_cast<uintptr_t>(source) % 16 == 0 && bytes % 16 == 0, "bulk copies of 16 bytes");
  std::memcpy(at(target), source, bytes);
  MBarrier& waiting = mbarrier(barrier);
  waiting.bytes -= bytes;
  waiting.done();
}

void load_box(uint32_t target, const void* tensor_map, std::initializer_list<int> corner, uint32_t barrier) {
  const Map& map = *static_cast<const Map*>(tensor_map);
  require(target % 128 == 0, "boxes on 128 bytes");
  uint32_t box[4] = {map.box[0], 1, 1, 1}, place = target;
  for (uint32_t axis = 1; axis < map.rank; ++axis) box[axis] = map.box[axis];
  int at_number[4] = {};
  std::copy(corner.begin(), corner.end(), at_number);
  for (uint32_t w = 0; w < box[3]; ++w)
    for (uint32_t z = 0; z < box[2]; ++z)
      for (uint32_t y = 0; y < box[1]; ++y)
        for (uint32_t x = 0; x < box[0]; ++x, place += map.size) {
          int64_t i[4] = {at_number[0] + int64_t(x), at_number[1] + int64_t(y), at_number[2] + int64_t(z), at_number[3] + int64_t(w)};
          bool inside = true;
          for (uint32_t axis = 0; axis < map.rank; ++axis) inside &= i[axis] >= 0 && uint64_t(i[axis]) < map.extents[axis];
          char* to = at(map.swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? place ^ (place >> 7 & 7) << 4 : place);
          const char* from = map.base + i[0] * map.size;
          for (uint32_t axis = 1; axis < map.rank; ++axis) from += i[axis] * int64_t(map.strides[axis - 1]);
          if (inside) std::memcpy(to, from, map.size);
          else std::memset(to, 0, map.size);
        }
  MBarrier& waiting = mbarrier(barrier);
  waiting.bytes -= box[0] * box[1] * box[2] * box[3] * map.size;
  waiting.done();
}

}  // namespace simt
