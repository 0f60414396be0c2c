// What a CPU can do: bytes read per second, and operations per second of each of its multipliers.
//
//   cc -O3 -march=native -pthread limits.c -o limits
//   limits read THREADS BYTES OTHERS      # huge pages, one linear stream a thread; after as many bytes of others
//   limits UNIT THREADS SECONDS           # f32, bf16, i8, amx_bf16, amx_i8
//   limits units                          # those that this processor has
//
// Prints one number a sample, per second, of all threads together.  A thread's operands stay in registers.
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define HUGE ((size_t)2 << 20)

static pthread_barrier_t barrier;
static volatile uint64_t sink;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// ---- units: each returns the operations of one call --------------------------------------------------------------
// Twelve independent sums hide the latency of two pipes; the asm keeps the compiler from merging or moving them.
#define TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define ROUNDS 4096

#if defined(__AVX512F__)
static double unit_f32(void) {
  __m512 a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(1e-9f);
#define X(i) __m512 s##i = _mm512_setzero_ps();
  TWELVE(X)
#undef X
  for (int r = 0; r < ROUNDS; ++r) {
#define X(i) __asm__("vfmadd231ps %1, %2, %0" : "+v"(s##i) : "v"(a), "v"(b));
    TWELVE(X)
#undef X
  }
#define X(i) sink += (uint64_t)_mm512_reduce_add_ps(s##i);
  TWELVE(X)
#undef X
  return 12.0 * ROUNDS * 16 * 2;
}
#elif defined(__FMA__)
static double unit_f32(void) {
  __m256 a = _mm256_set1_ps(1.0f), b = _mm256_set1_ps(1e-9f);
#define X(i) __m256 s##i = _mm256_setzero_ps();
  TWELVE(X)
#undef X
  for (int r = 0; r < ROUNDS; ++r) {
#define X(i) __asm__("vfmadd231ps %1, %2, %0" : "+x"(s##i) : "x"(a), "x"(b));
    TWELVE(X)
#undef X
  }
#define X(i) sink += (uint64_t)_mm256_cvtss_f32(s##i);
  TWELVE(X)
#undef X
  return 12.0 * ROUNDS * 8 * 2;
}
#endif

#if defined(__AVX512BF16__)
static double unit_bf16(void) {
  __m512i a = _mm512_set1_epi32(0x3f803f80), b = _mm512_setzero_si512();
#define X(i) __m512 s##i = _mm512_setzero_ps();
  TWELVE(X)
#undef X
  for (int r = 0; r < ROUNDS; ++r) {
#define X(i) __asm__("vdpbf16ps %1, %2, %0" : "+v"(s##i) : "v"(a), "v"(b));
    TWELVE(X)
#undef X
  }
#define X(i) sink += (uint64_t)_mm512_reduce_add_ps(s##i);
  TWELVE(X)
#undef X
  return 12.0 * ROUNDS * 32 * 2;
}
#endif

#if defined(__AVX512VNNI__)
static double unit_i8(void) {
  __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(1);
#define X(i) __m512i s##i = _mm512_setzero_si512();
  TWELVE(X)
#undef X
  for (int r = 0; r < ROUNDS; ++r) {
#define X(i) __asm__("vpdpbusd %1, %2, %0" : "+v"(s##i) : "v"(a), "v"(b));
    TWELVE(X)
#undef X
  }
#define X(i) sink += (uint64_t)_mm512_reduce_add_epi32(s##i);
  TWELVE(X)
#undef X
  return 12.0 * ROUNDS * 64 * 2;
}
#elif defined(__AVXVNNI__)
static double unit_i8(void) {
  __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(1);
#define X(i) __m256i s##i = _mm256_setzero_si256();
  TWELVE(X)
#undef X
  for (int r = 0; r < ROUNDS; ++r) {
#define X(i) __asm__("%{vex%} vpdpbusd %1, %2, %0" : "+x"(s##i) : "x"(a), "x"(b));
    TWELVE(X)
#undef X
  }
#define X(i) sink += (uint64_t)_mm256_extract_epi32(s##i, 0);
  TWELVE(X)
#undef X
  return 12.0 * ROUNDS * 32 * 2;
}
#elif defined(__AVX2__)
static double unit_i8(void) {  // vpmaddubsw, vpmaddwd, vpaddd: three instructions for 32 products
  __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(1), one = _mm256_set1_epi16(1);
#define X(i) __m256i s##i = _mm256_setzero_si256();
  TWELVE(X)
#undef X
  for (int r = 0; r < ROUNDS; ++r) {
#define X(i)                                                                                       \
  {                                                                                                \
    __m256i p;                                                                                     \
    __asm__("vpmaddubsw %2, %1, %0" : "=x"(p) : "x"(a), "x"(b));                                   \
    s##i = _mm256_add_epi32(s##i, _mm256_madd_epi16(p, one));                                      \
  }
    TWELVE(X)
#undef X
  }
#define X(i) sink += (uint64_t)_mm256_extract_epi32(s##i, 0);
  TWELVE(X)
#undef X
  return 12.0 * ROUNDS * 32 * 2;
}
#endif

#if defined(__AMX_TILE__)
struct __attribute__((packed)) tiles {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

static int amx_allowed(void) {  // Linux gives tiles to those that ask
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
}

static void amx_begin(void) {
  struct tiles t = {.palette = 1};
  for (int i = 0; i < 8; ++i) t.bytes[i] = 64, t.rows[i] = 16;
  __asm__ volatile("ldtilecfg %0" ::"m"(t));  // gcc 12 takes its own _tile_loadconfig to read eight bytes
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
}

// Two by two tiles of sums, as a product has them: a = 4, 5 and b = 6, 7.
#define AMX(NAME, DP, PER)                                                                         \
  static double NAME(void) {                                                                       \
    amx_begin();                                                                                   \
    for (int r = 0; r < ROUNDS; ++r) {                                                             \
      DP(0, 4, 6); DP(1, 4, 7); DP(2, 5, 6); DP(3, 5, 7);                                          \
    }                                                                                              \
    _tile_release();                                                                               \
    return 4.0 * ROUNDS * 16 * 16 * (PER) * 2;                                                     \
  }
#if defined(__AMX_BF16__)
AMX(unit_amx_bf16, _tile_dpbf16ps, 32)
#endif
#if defined(__AMX_INT8__)
AMX(unit_amx_i8, _tile_dpbusd, 64)
#endif
#endif

static const struct unit {
  const char *name;
  double (*run)(void);
  int tiles;
} units[] = {
#if defined(__AVX512F__) || defined(__FMA__)
    {"f32", unit_f32, 0},
#endif
#if defined(__AVX512BF16__)
    {"bf16", unit_bf16, 0},
#endif
#if defined(__AVX2__)
    {"i8", unit_i8, 0},
#endif
#if defined(__AMX_BF16__)
    {"amx_bf16", unit_amx_bf16, 1},
#endif
#if defined(__AMX_INT8__)
    {"amx_i8", unit_amx_i8, 1},
#endif
    {NULL, NULL, 0},
};

// ---- reading -----------------------------------------------------------------------------------------------------
// Memory is read as contenders read their weights: a turn is some passes over the same bytes, after those of others have
// gone through the caches.
#define TURNS 4
#define PASSES 8

static double read_all(const char *p, size_t bytes) {  // prefetches half a page ahead, as a kernel with one stream would
#if defined(__AVX512F__)
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (size_t i = 0; i < bytes; i += 256) {
    for (int line = 0; line < 4; ++line) _mm_prefetch(p + i + 2048 + 64 * line, _MM_HINT_T0);
    a = _mm512_xor_si512(a, _mm512_load_si512(p + i));
    b = _mm512_xor_si512(b, _mm512_load_si512(p + i + 64));
    c = _mm512_xor_si512(c, _mm512_load_si512(p + i + 128));
    d = _mm512_xor_si512(d, _mm512_load_si512(p + i + 192));
  }
  a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
  sink += (uint64_t)_mm512_reduce_add_epi64(a);
#else
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (size_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(p + i + 2048);
    const uint64_t *q = (const uint64_t *)(p + i);
    a ^= q[0] ^ q[1], b ^= q[2] ^ q[3], c ^= q[4] ^ q[5], d ^= q[6] ^ q[7];
  }
  sink += a ^ b ^ c ^ d;
#endif
  return (double)bytes;
}

// ---- threads -----------------------------------------------------------------------------------------------------
struct job {
  const struct unit *unit;
  const char *memory, *others;
  size_t bytes, others_bytes;
  double seconds, done, elapsed[TURNS * PASSES], amount[TURNS * PASSES];
  int samples;
};

static void *work(void *given) {
  struct job *job = given;
  for (int s = 0; s < job->samples; ++s) {
    if (!job->unit && s % PASSES == 0) read_all(job->others, job->others_bytes);
    pthread_barrier_wait(&barrier);
    double begin = now(), end, done = 0;
    do {
      done += job->unit ? job->unit->run() : read_all(job->memory, job->bytes);
      end = now();
    } while (job->unit && end - begin < job->seconds / job->samples);
    job->elapsed[s] = end - begin, job->amount[s] = done;
  }
  return NULL;
}

int main(int argc, char **argv) {
  if (argc == 2 && !strcmp(argv[1], "units")) {
    for (const struct unit *u = units; u->name; ++u)
#if defined(__AMX_TILE__)
      if (!u->tiles || amx_allowed())
#endif
        puts(u->name);
    return 0;
  }
  int reads = argc == 5 && !strcmp(argv[1], "read");
  if (!reads && argc != 4) return fprintf(stderr, "limits read THREADS BYTES OTHERS | UNIT THREADS SECONDS | units\n"), 2;
  const struct unit *unit = NULL;
  if (!reads) {
    for (unit = units; unit->name && strcmp(unit->name, argv[1]); ++unit) {}
    if (!unit->name) return fprintf(stderr, "limits: this processor or compiler has no %s\n", argv[1]), 2;
#if defined(__AMX_TILE__)
    if (unit->tiles && !amx_allowed()) return fprintf(stderr, "limits: the system gives no AMX tiles\n"), 2;
#endif
  }
  int threads = atoi(argv[2]);
  if (threads < 1 || threads > MAX_THREADS) return fprintf(stderr, "limits: 1 to %d threads\n", MAX_THREADS), 2;
  double seconds = reads ? 0 : atof(argv[3]);
  size_t share = 0, other = 0;
  char *memory = NULL;
  if (reads) {
    share = strtoull(argv[3], NULL, 10) / threads / HUGE * HUGE;
    other = strtoull(argv[4], NULL, 10) / threads / HUGE * HUGE;
    if (!share) return fprintf(stderr, "limits: a thread reads 2 MiB at least\n"), 2;
    size_t whole = (share + other) * threads;
    char *raw = mmap(NULL, whole + 2 * HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return perror("limits: mmap"), 1;
    memory = (char *)(((uintptr_t)raw + HUGE - 1) / HUGE * HUGE);
    madvise(memory, whole, MADV_HUGEPAGE);
    memset(memory, 1, whole);
  }
  static struct job jobs[MAX_THREADS];
  pthread_t ids[MAX_THREADS];
  const int samples = reads ? TURNS * PASSES : 16;
  pthread_barrier_init(&barrier, NULL, threads);
  for (int t = 0; t < threads; ++t) {
    jobs[t] = (struct job){
        .unit = unit, .memory = memory + share * t, .others = memory + share * threads + other * t, .bytes = share,
        .others_bytes = other, .seconds = seconds, .samples = samples};
    pthread_create(&ids[t], NULL, work, &jobs[t]);
  }
  for (int t = 0; t < threads; ++t) pthread_join(ids[t], NULL);
  for (int s = 0; s < samples; ++s) {
    double rate = 0;
    for (int t = 0; t < threads; ++t) rate += jobs[t].amount[s] / jobs[t].elapsed[s];
    printf("%.6g\n", rate);
  }
  return 0;
}
