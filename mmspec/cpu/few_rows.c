/* out = x w^T + bias for a few rows of x, float32, from the weight where it lies.

   An element of out is LANES partial sums, each over every LANES-th column in ascending order, in segments of 512 to
   1023 columns, added in a fixed order. It depends on its row of x and its row of w alone: not on the number of rows or
   of threads, or on its place in out.

   The weight is read once. While a block of it is multiplied, blocks that follow are prefetched; columns are taken in
   panels that are small enough for x to stay in the first-level cache. Uses no library: the caller passes the entry of
   the OpenMP runtime whose threads are to be used. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define WEIGHT_ROWS 4           /* rows of w in one block */
#define MAX_ROWS 32             /* rows of x */
#define CHUNK_ROWS 16           /* rows of w whose partial sums are kept between panels */
#define SEGMENT 512             /* columns that are summed apart, which limits the error of long rows */
#define X_BYTES (40 << 10)      /* of x, up to which it stays in a first-level cache of 32 or 48 KiB well enough */
#define AHEAD_BYTES (8 << 10)   /* of w, between the block in use and the block that is prefetched */
#define THREAD_BYTES (64 << 10) /* of w, for which a further thread pays */

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */

typedef struct {
  const float *x, *w, *bias, *packed;
  float *out;
  int64_t R, K, N;
  int64_t chunk, panel; /* rows of w and columns that are taken at once */
  int64_t next;         /* the first row of w that no thread has taken */
} job;

/* The first row of a chunk that no other thread has; N or more if none is left. */
static inline int64_t take_chunk(job *j) { return __atomic_fetch_add(&j->next, j->chunk, __ATOMIC_RELAXED); }

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

#define NAME(part) avx2_##part
#define ISA "avx2,fma"
#define LANES 8
#define TILE 3
#define VEC __m256
#define ZERO _mm256_setzero_ps
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define FMA _mm256_fmadd_ps
#define HALVES(v) v
#include "few_rows.h"

#define NAME(part) avx512_##part
#define ISA "avx512f,avx512dq,avx2,fma"
#define LANES 16
#define TILE 6
#define VEC __m512
#define ZERO _mm512_setzero_ps
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define FMA _mm512_fmadd_ps
#define HALVES(v) _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))
#include "few_rows.h"

/* The instructions of this processor: 2 for AVX-512, 1 for AVX2, 0 for neither. */
EXPORT int few_rows_level(void) {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return 2;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
}

/* x [R, K], w [N, K], bias [N] or NULL, out [R, N], all contiguous, 1 <= R <= 32; level 1 or 2, as few_rows_level.
   `parallel` is NULL where there is one thread. */
EXPORT int few_rows_linear(const float *x, const float *w, const float *bias, float *out, int64_t R, int64_t K,
                            int64_t N, int level, int64_t num_threads, parallel_fn parallel) {
  const int64_t row_bytes = K * (int64_t)sizeof(float);
  const int64_t threads = min64(num_threads, 1 + N * row_bytes / THREAD_BYTES);
  const int64_t lanes = level == 2 ? 16 : 8;
  job j = {x, w, bias, NULL, out, R, K, N, CHUNK_ROWS, K, 0};
  if (R <= 16 && K >= 2 * SEGMENT && R * row_bytes > X_BYTES) j.panel = SEGMENT; /* else partial sums cost more */
  float *packed = aligned_alloc(64, (size_t)(R * (K + lanes) + 15) / 16 * 64);
  if (!packed) return 0;
  if (level == 2) avx512_pack(&j, packed); else avx2_pack(&j, packed);
  void (*const worker)(void *) = level == 2 ? avx512_worker : avx2_worker;
  if (parallel && threads > 1)
    parallel(worker, &j, (unsigned)threads, 0);
  else
    worker(&j);
  free(packed);
  return 1;
}
