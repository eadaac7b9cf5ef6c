/* out = x w^T + bias for a few rows of x, float32, from the weight where it lies; and a stack of decoder layers of such
   products (decoder.h), and draft heads (draft.h, dspark.h).

   An element of out is LANES partial sums, each over every LANES-th column in ascending order, in segments of 512 to
   1023 columns, added in a fixed order. It depends on its row of x and its row of w alone: not on the number of rows or
   of threads, or on its place in out.

   The weight is read once. While a block of it is multiplied, blocks that follow are prefetched; columns are taken in
   panels that are small enough for x to stay in the first-level cache. Uses no library: the caller passes the entries of
   the OpenMP runtime whose threads are to be used. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define WEIGHT_ROWS 4           /* rows of w in one block */
#define MAX_ROWS 32             /* rows of x that are multiplied with a chunk at once */
#define CHUNK_ROWS 16           /* rows of w that a thread takes at once */
#define SEGMENT 512             /* columns that are summed apart, which limits the error of long rows */
#define X_BYTES (40 << 10)      /* of x, up to which it stays in a first-level cache of 32 or 48 KiB well enough */
#ifndef AHEAD_BYTES
#define AHEAD_BYTES (8 << 10)   /* of w, between the block in use and the block that is prefetched */
#endif
#define THREAD_BYTES (64 << 10) /* of w, for which a further thread pays */

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */
typedef void (*barrier_fn)(void);                                           /* GOMP_barrier */

/* A weight [N, K] or a part of one, and where its product with each row of x goes. */
typedef struct {
  const float *w, *bias; /* bias: NULL for none */
  float *out;            /* of the first row of x */
  int64_t N;
} part;

/* The rows of x and how their products are stored. */
typedef struct {
  const float *packed;
  int64_t R, K;
  int64_t out_step; /* numbers from a row of the output to the next */
  int is_added;     /* whether a product is added to the output, else it replaces it */
} rows;

/* At most MAX_ROWS of them. */
typedef struct {
  const float *packed;
  int64_t R, K;
  int64_t panel; /* columns that are taken at once */
  int64_t out_step;
  int is_added;
} product;

/* Up to CHUNK_ROWS rows of a part. */
typedef struct {
  const float *w, *bias;
  const float *next; /* the chunk that follows, to prefetch it; NULL for none */
  float *out;
  int64_t rows, next_rows;
} chunk;

/* Arguments of the threads of `few_rows_linear`. */
typedef struct {
  rows x;
  part part;
  int64_t next;
} linear;

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t take(int64_t *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }
static inline int64_t num_chunks(int64_t N) { return (N + CHUNK_ROWS - 1) / CHUNK_ROWS; }

/* Rows of a part from chunk `number` on. */
static chunk chunk_at(const rows *x, const part *p, int64_t number) {
  const int64_t n = number * CHUNK_ROWS;
  const float *const bias = p->bias ? p->bias + n : NULL;
  return (chunk){p->w + n * x->K, bias, NULL, p->out + n, min64(CHUNK_ROWS, p->N - n), 0};
}

/* The next chunk that no thread has taken; 0 if none is left. */
static int find_chunk(const rows *x, const part *parts, int num_parts, int64_t *next, chunk *found) {
  int64_t number = take(next);
  for (int i = 0; i < num_parts; number -= num_chunks(parts[i++].N))
    if (number < num_chunks(parts[i].N)) {
      *found = chunk_at(x, parts + i, number);
      return 1;
    }
  *found = (chunk){0};
  return 0;
}

/* Columns that are taken at once. With more rows, the sums that are kept between panels cost more than they save. */
static int64_t panel_width(int64_t R, int64_t K) {
  return R <= 16 && K >= 2 * SEGMENT && R * K * (int64_t)sizeof(float) > X_BYTES ? SEGMENT : K;
}

#include "decoder_types.h"
#include "draft_types.h"

#define NAME(part) avx2_##part
#define ISA "avx2,fma"
#define LANES 8
#define TILE 3
#define VEC __m256
#define ZERO _mm256_setzero_ps
#define SET1 _mm256_set1_ps
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define FMA _mm256_fmadd_ps
#define MAX _mm256_max_ps
#define ANY_ABOVE(a, b) _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ))
#define HALVES(v) v
#include "few_rows.h"
#include "decoder.h"
#include "draft.h"
#include "dspark.h"
#include "draft_workers.h"
#include "end_of_isa.h"

#define NAME(part) avx512_##part
#define ISA "avx512f,avx512dq,avx2,fma"
#define LANES 16
#define TILE 6
#define VEC __m512
#define ZERO _mm512_setzero_ps
#define SET1 _mm512_set1_ps
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define FMA _mm512_fmadd_ps
#define MAX _mm512_max_ps
#define ANY_ABOVE(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)
#define HALVES(v) _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))
#include "few_rows.h"
#include "decoder.h"
#include "draft.h"
#include "dspark.h"
#include "draft_workers.h"
#include "end_of_isa.h"

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
  const int64_t threads = min64(num_threads, 1 + N * K * (int64_t)sizeof(float) / THREAD_BYTES);
  const int64_t lanes = level == 2 ? 16 : 8;
  float *packed = aligned_alloc(64, (size_t)(R * (K + lanes) + 15) / 16 * 64);
  if (!packed) return 0;
  linear l = {{packed, R, K, N, 0}, {w, bias, out, N}, 0};
  if (level == 2) avx512_pack_groups(x, R, K, NULL, 0, packed); else avx2_pack_groups(x, R, K, NULL, 0, packed);
  void (*const worker)(void *) = level == 2 ? avx512_worker : avx2_worker;
  if (parallel && threads > 1)
    parallel(worker, &l, (unsigned)threads, 0);
  else
    worker(&l);
  free(packed);
  return 1;
}

/* Bytes of a struct (0: `decoder`, 1: `decoder_layer`, 2: `draft`), for callers to compare with their declarations. */
EXPORT int64_t few_rows_struct_bytes(int number) {
  return number == 0 ? sizeof(decoder) : number == 1 ? sizeof(decoder_layer) : sizeof(draft);
}

/* Floats of `decoder.scratch` that `few_rows_decode` needs for this decoder and number of threads. */
EXPORT int64_t few_rows_decode_scratch(const decoder *d, int64_t num_threads) {
  return shared_floats(d) + num_threads * thread_floats(d);
}

/* One forward of a decoder; 0 if a token has no embedding or a position no rotary angles, and then nothing is done. */
EXPORT int few_rows_decode(const decoder *d, int level, int64_t num_threads, parallel_fn parallel, barrier_fn barrier) {
  decoding s = {.d = d, .barrier = barrier};
  if (!begin_decoding(&s)) return 0;
  const int64_t threads = parallel ? min64(num_threads, 1 + layer_bytes(d) / (4 * THREAD_BYTES)) : 1;
  void (*const worker)(void *) = level == 2 ? avx512_decode : avx2_decode;
  s.has_team = threads > 1;
  if (threads > 1)
    parallel(worker, &s, (unsigned)threads, 0);
  else
    worker(&s);
  return 1;
}

/* Floats of `draft.d.scratch` that the following functions need for this head and number of threads. */
EXPORT int64_t few_rows_draft_scratch(const draft *h, int64_t num_threads) {
  drafting g = {.h = h};
  return divide_scratch(&g, h->d.scratch) - h->d.scratch + num_threads * draft_thread_floats(h);
}

static void run_draft(drafting *g, void (*worker)(void *), int64_t num_threads, parallel_fn parallel) {
  const int64_t D = g->d.hidden_size, layers = g->d.num_layers * layer_bytes(&g->d);
  const int64_t bytes = layers + 4 * D * (2 * D + g->d.vocab_size);
  const int64_t threads = parallel ? min64(num_threads, 1 + bytes / (4 * THREAD_BYTES)) : 1;
  g->s.has_team = threads > 1;
  if (threads > 1)
    parallel(worker, g, (unsigned)threads, 0);
  else
    worker(g);
}

/* One forward of a head over committed tokens: sets `root`, if it has one (DSpark has not). */
EXPORT int few_rows_head_forward(const draft *h, int level, int64_t num_threads, parallel_fn parallel,
                                 barrier_fn barrier) {
  drafting g;
  begin_drafting(&g, h, barrier);
  begin_forward(&g);
  void (*const worker)(void *) = level == 2 ? avx512_head_forward : avx2_head_forward;
  void (*const dspark)(void *) = level == 2 ? avx512_dspark_forward : avx2_dspark_forward;
  run_draft(&g, is_dspark(h) ? dspark : worker, num_threads, parallel);
  return 1;
}

/* A tree: from `root`, or from `anchors`, to `tree_tokens`, `tree_parents`, `tree_scores`, `tree_mask`. */
EXPORT int few_rows_draft_tree(const draft *h, int level, int64_t num_threads, parallel_fn parallel,
                               barrier_fn barrier) {
  drafting g;
  begin_drafting(&g, h, barrier);
  if (is_dspark(h)) begin_block(&g);
  run_draft(&g, level == 2 ? avx512_draft_tree : avx2_draft_tree, num_threads, parallel);
  return 1;
}

#include "ngrams.h"
#include "trees.h"
