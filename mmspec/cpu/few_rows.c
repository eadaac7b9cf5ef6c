/* out = x w^T + bias for a few rows of x, or many (many_rows.h), from the weight where it lies (weights.h: its types); a
   stack of decoder layers of such products (decoder.h), and draft heads (draft.h, dspark.h).

   With a weight of a float type an element of out is LANES partial sums in float32, each over every LANES-th column in
   ascending order, in segments of 512 to 1023 columns, added in a fixed order. A weight of 16 bits is widened in
   registers, so that the result is that of the widened weight, bit for bit; or, with rows of bfloat16 too, multiplied in pairs
   (pairs.h). With a quantised weight (quantised.h) x is
   rounded to 8 bits in groups of 32 columns; the products of a group are added as whole numbers, and the groups in
   ascending order. In each case an element depends on its row of x and its row of w alone: not on the number of rows or
   of threads, or on its place in out.

   The weight is read once. While a block of it is multiplied, blocks that follow are prefetched; columns are taken in
   panels that are small enough for x to stay in the first-level cache. Uses no library: the caller passes the entries of
   the OpenMP runtime whose threads are to be used. */

#include <float.h>
#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define WEIGHT_ROWS 4           /* rows of w in one block */
#define MAX_ROWS 32             /* rows of x that are multiplied with a chunk at once */
#define CHUNK_ROWS 16           /* rows of w that a thread takes at once; of pairs in tiles twice as many */
#define LINE 64                 /* bytes of a line of the caches */
#define SEGMENT 512             /* columns that are summed apart, which limits the error of long rows */
#define X_BYTES (40 << 10)      /* of x, up to which it stays in a first-level cache of 32 or 48 KiB well enough */
#ifndef AHEAD_BYTES
#define AHEAD_BYTES (8 << 10)   /* of w, between the block in use and the block that is prefetched */
#endif
#define THREAD_BYTES (64 << 10) /* of w, for which a further thread pays */

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */

#include "weights.h"
#include "team.h"

/* Rows of x that there is room for where R are packed: tiles have 16. */
static inline int64_t packed_rows(int64_t R) {
#ifdef TILES
  return ceil_div(R, TILE_ROWS) * TILE_ROWS;
#else
  return R;
#endif
}

/* A weight or its first N rows, and where its product with each row of x goes. */
typedef struct {
  const weights *w;
  const float *bias; /* [N], or NULL for none */
  float *out;        /* of the first row of x; `rows.is_narrow`: numbers of 16 bits */
  int64_t N;
} part;

/* The rows of x and how their products are stored. All parts that are multiplied with them are of float types, or all are
   quantised: `pack_groups` prepares x for one or the other. */
typedef struct {
  const float *packed;
  int64_t R, K;
  int64_t out_step; /* numbers from a row of the output to the next */
  int is_added;     /* whether a product is added to the output, else it replaces it */
  int type;         /* float type to which a product with its bias is rounded, and after it is added once more */
  int is_narrow;    /* whether the output has that type; else it has float32 */
} rows;

/* At most MAX_ROWS of them. */
typedef struct {
  const rows *x;
  const float *packed;
  int64_t R, K;
  int64_t panel; /* columns that are taken at once */
} product;

/* Up to `chunk_rows` rows of a part. */
typedef struct {
  const char *w;
  const uint16_t *scales;
  const float *bias;
  const char *next; /* the chunk that follows, of the same type, to prefetch it; NULL for none */
  const int64_t *hash; /* what the hash of `w` should be; NULL if it is not compared */
  int64_t *is_stale;
  float *out;
  int64_t rows, next_rows, type;
} chunk;

/* Arguments of the threads of `few_rows_linear`. */
typedef struct {
  rows x;
  part part;
  int64_t next;
  const uint16_t *from; /* rows of bfloat16 to be packed */
} linear;

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t take(int64_t *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }

/* Rows of w that a thread takes at once. */
static inline int64_t chunk_rows(const weights *w) {
#ifdef TILES
  if (w->type == BFLOAT16_PAIRS) return 2 * TILE_ROWS; /* x is loaded half as often */
#endif
  (void)w;
  return CHUNK_ROWS;
}

static inline int64_t num_chunks(const weights *w, int64_t N) { return ceil_div(N, chunk_rows(w)); }

/* The place n numbers behind a place of the output. */
static inline float *out_at(const rows *x, float *out, int64_t n) {
  return x->is_narrow ? (float *)((uint16_t *)out + n) : out + n;
}

/* Rows of a part from chunk `number` on. */
static chunk chunk_at(const rows *x, const part *p, int64_t number) {
  const weights *const w = p->w;
  const int64_t n = number * chunk_rows(w);
  return (chunk){
      .w = (const char *)w->data + bytes_of_rows(w->type, n, x->K),
      .scales = w->scales ? w->scales + n * num_groups(x->K) : NULL,
      .bias = p->bias ? p->bias + n : NULL,
      .hash = w->hashes ? w->hashes + number : NULL,
      .is_stale = w->is_stale,
      .out = out_at(x, p->out, n),
      .rows = min64(chunk_rows(w), p->N - n),
      .type = w->type,
  };
}

/* Let a chunk prefetch the one that is multiplied after it. */
static inline void set_next(chunk *c, const chunk *following) {
  c->next = following->type == c->type ? following->w : NULL;
  c->next_rows = following->rows;
}

/* The next chunk of a run, or of another one that no thread has taken; 0 if none is left. */
static int find_chunk(const rows *x, const part *parts, int num_parts, int64_t *next, run *r, chunk *found) {
  int64_t count = 0;
  for (int i = 0; i < num_parts; i++) count += num_chunks(parts[i].w, parts[i].N);
  if (r->at == r->end) *r = take_run(next, count);
  int64_t number = r->at == r->end ? count : r->at++;
  for (int i = 0; i < num_parts; number -= num_chunks(parts[i].w, parts[i].N), i++)
    if (number < num_chunks(parts[i].w, parts[i].N)) {
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

/* Add bias and what is there to the sums of `count` rows of a chunk from row m on with row r of x, round, store. */
AVX2_INLINE void finish(const product *p, const chunk *c, int64_t r, int64_t m, int64_t count, __m128 sum) {
  const rows *const x = p->x;
  float *const to = out_at(x, c->out, r * x->out_step + m);
  const size_t bytes = (size_t)count * (x->is_narrow ? sizeof(uint16_t) : sizeof(float));
  float part[4] = {0};
  if (c->bias) {
    memcpy(part, c->bias + m, (size_t)count * sizeof(float));
    sum = _mm_add_ps(sum, _mm_loadu_ps(part));
  }
  sum = round4(sum, x->type);
  if (x->is_added) {
    memcpy(part, to, (size_t)count * sizeof(float));
    sum = round4(_mm_add_ps(_mm_loadu_ps(part), sum), x->type);
  }
  const __m128i stored = x->is_narrow ? narrow4(sum, x->type) : _mm_castps_si128(sum);
  if (bytes == sizeof stored)
    _mm_storeu_si128((__m128i *)to, stored);
  else
    memcpy(to, &stored, bytes);
}

#include "bf16_copies.h"
#include "quantised.h"
#include "quantise.h"
#include "many_types.h"
#include "decoder_types.h"
#include "draft_types.h"
#include "draft_tree.h"
#include "ngrams.h"
#include "chain_types.h"

/* The instruction set of this library: AVX2, with -DAVX512 AVX-512, with -DPAIRS VDPBF16PS besides, with -DTILES AMX. */
#ifdef AVX512
#define NAME(part) avx512_##part
#ifdef PAIRS
#ifdef TILES
#define ISA "amx-tile,amx-bf16,avx512f,avx512dq,avx512bf16,avx2,fma,f16c"
#else
#define ISA "avx512f,avx512dq,avx512bf16,avx2,fma,f16c"
#endif
static void multiply_pairs(const product *p, const chunk *c);
static void pack_pairs(const float *x, int64_t R, int64_t K, float *to);
#else
#define ISA "avx512f,avx512dq,avx2,fma,f16c"
#endif
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
#define WIDEN_BFLOAT16(p) \
  _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define WIDEN_FLOAT16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#else
#define NAME(part) avx2_##part
#define ISA "avx2,fma,f16c"
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
#define WIDEN_BFLOAT16(p) \
  _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define WIDEN_FLOAT16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#endif
#include "few_rows.h"
#include "many_rows.h"
#ifdef PAIRS
#include "pairs.h"
#endif
#include "decoder.h"
#include "mixer_prompts.h"
#include "next_tokens.h"
#include "draft.h"
#include "dspark.h"
#include "draft_workers.h"

static void work(void *data) {
  const region *const r = data;
  sharers = r->threads;
#ifdef TILES
  with_tiles(r);
#else
  r->worker(r->data);
#endif
}

static void run_threads(void (*worker)(void *), void *data, int64_t threads, parallel_fn parallel) {
  region r = {worker, data, parallel ? threads : 1};
  if (r.threads > 1)
    parallel(work, &r, (unsigned)threads, 0);
  else
    work(&r);
}

/* `few_rows_linear` with many rows. */
static int many_rows_linear(const void *x, int type, const weights *w, const void *bias, void *out, int64_t R,
                            int64_t num_threads, parallel_fn parallel) {
  const int64_t K = w->cols, N = w->rows, lanes = LANES, width = X_ROWS(lanes), bytes = float_bytes(type);
  const int64_t threads = min64(num_threads, 1 + R * N * K / THREAD_PRODUCTS);
  const int64_t tile = lanes * plane(K, lanes, width), most = max64(MANY_TILES, MANY_BYTES / (tile * 4));
  const int64_t tiles = ceil_div(ceil_div(R, width), ceil_div(ceil_div(R, width), most)), at_once = tiles * width;
  const int64_t own = threads * lanes * plane(K, lanes, W_ROWS(lanes)), narrow_bias = bias && type != FLOAT32 ? N : 0;
  float *const packed = aligned_alloc(64, (size_t)ceil_div(tiles * tile + own + narrow_bias, 16) * 64);
  if (!packed) return 0;
  many m = {.from = x, .packed = packed, .own = packed + tiles * tile, .part = {w, bias, out, N}};
  m.parts = max64(1, min64(tiles / PART_TILES, ceil_div(TASKS * threads, ceil_div(N, W_ROWS(lanes)))));
  if (narrow_bias) widen(bias, type, N, m.own + own), m.part.bias = m.own + own;
  for (int64_t row = 0; row < R; row += at_once) {
    m.x = (rows){packed, min64(at_once, R - row), K, N, 0, type, type != FLOAT32};
    m.next = m.next_tile = m.ticket = 0;
    run_threads(NAME(many_pack), &m, threads, parallel);
    run_threads(NAME(many_worker), &m, threads, parallel);
    m.from += at_once * K * bytes, m.part.out = (float *)((char *)m.part.out + at_once * N * bytes);
  }
  free(packed);
  return 1;
}

#ifdef PAIRS
/* `few_rows_linear` with a weight of BFLOAT16_PAIRS. */
static int pairs_linear(const uint16_t *x, const weights *w, const void *bias, void *out, int64_t R, int64_t num_threads,
                        parallel_fn parallel) {
  const int64_t K = w->cols, N = w->rows, threads = min64(num_threads, 1 + weight_bytes(w) / THREAD_BYTES);
  const int64_t packed_floats = packed_rows(R) * pair_floats(K);
  float *const packed = aligned_alloc(64, (size_t)(packed_floats + (bias ? N : 0) + 15) / 16 * 64);
  float *const wide_bias = bias ? packed + packed_floats : NULL;
  if (!packed) return 0;
  if (bias) widen(bias, BFLOAT16, N, wide_bias);
  linear l = {{packed, R, K, N, 0, BFLOAT16, 1}, {w, wide_bias, out, N}, 0, x};
  run_threads(pair_pack_worker, &l, min64(threads, ceil_div(R, MAX_ROWS)), parallel);
  l.next = 0;
  run_threads(NAME(worker), &l, threads, parallel);
  free(packed);
  return 1;
}
#endif

/* x [R, K], bias [w->rows] or NULL, out [R, w->rows], all contiguous and of the float type x_type; 1 <= R, at most 32 with
   a quantised weight. With PAIRS weights may be of BFLOAT16_PAIRS. `parallel` is NULL
   where there is one thread. 0 if there is no memory. */
EXPORT int few_rows_linear(const void *x, int x_type, const weights *w, const void *bias, void *out, int64_t R,
                           int64_t num_threads, parallel_fn parallel) {
#ifdef PAIRS
  if (w->type == BFLOAT16_PAIRS) return pairs_linear(x, w, bias, out, R, num_threads, parallel);
#endif
  if (R > MAX_ROWS)
    return !is_quantised(w->type) && many_rows_linear(x, x_type, w, bias, out, R, num_threads, parallel);
  const int64_t K = w->cols, N = w->rows, threads = min64(num_threads, 1 + weight_bytes(w) / THREAD_BYTES);
  const int is_narrow = x_type != FLOAT32;
  const int64_t packed_floats = R * (K + MAX_LANES), wide_floats = is_narrow ? R * K + (bias ? N : 0) : 0;
  float *const packed = aligned_alloc(64, (size_t)(packed_floats + wide_floats + 15) / 16 * 64);
  if (!packed) return 0;
  const float *wide = x, *wide_bias = bias;
  if (is_narrow) {
    float *const to = packed + packed_floats;
    widen(x, x_type, R * K, to), wide = to;
    if (bias) widen(bias, x_type, N, to + R * K), wide_bias = to + R * K;
  }
  linear l = {{packed, R, K, N, 0, x_type, is_narrow}, {w, wide_bias, out, N}, 0, NULL};
  NAME(pack_groups)(w, wide, R, NULL, 0, packed);
  run_threads(NAME(worker), &l, threads, parallel);
  free(packed);
  return 1;
}

/* Bytes of a struct (0: `decoder`, 1: `decoder_layer`, 2: `draft`, 3: `weights`, 4: `chain`), for callers to compare with theirs. */
EXPORT int64_t few_rows_struct_bytes(int number) {
  const int64_t bytes[] = {sizeof(decoder), sizeof(decoder_layer), sizeof(draft), sizeof(weights), sizeof(chain)};
  return bytes[number];
}

/* Floats of `decoder.scratch` that `few_rows_decode` needs for this decoder and number of threads. */
EXPORT int64_t few_rows_decode_scratch(const decoder *d, int64_t num_threads) {
  return shared_floats(d) + num_threads * thread_floats(d);
}

/* One forward of a decoder; 0 if a token has no embedding or a position no rotary angles, and then nothing is done. */
EXPORT int few_rows_decode(const decoder *d, int64_t num_threads, parallel_fn parallel, team_size_fn team_size) {
  team t = {0};
  decoding s = {.d = d, .team = &t};
  if (!begin_decoding(&s)) return 0;
  const int64_t threads = parallel ? min64(num_threads, 1 + layer_bytes(d) / (4 * THREAD_BYTES)) : 1;
  void (*const worker)(void *) = NAME(decode);
  if (threads > 1) t.size_of_region = team_size;
  run_threads(worker, &s, threads, parallel);
  return 1;
}

/* The states [batch, num_value_heads, key_size, value_size] of a layer with a delta rule behind the first counts[b] nodes
   of each row's `path` [batch, steps], of those that the last forward over `nodes` of them has read, to `to`. */
EXPORT void few_rows_advance(const decoder_layer *l, int64_t batch, int64_t nodes, const int64_t *path, int64_t steps,
                             const int64_t *counts, float *to) {
  NAME(advance)(l, batch, nodes, path, steps, counts, to);
}

/* A gated delta rule over prompts (mixer_prompts.h). */
EXPORT void few_rows_delta_prompt(const delta_prompt *p, int64_t num_threads, parallel_fn parallel) {
  const int64_t heads = p->batch * p->num_value_heads, columns = ceil_div(p->value_size, 2 * LANES);
  delta_work w = {.p = p, .columns = heads < 2 * num_threads ? 1 : columns};
  const int64_t products = heads * p->tokens * p->key_size * p->value_size;
  run_threads(NAME(read_prompts), &w, min64(num_threads, 1 + products / THREAD_PRODUCTS), parallel);
}

/* A convolution over prompts. */
EXPORT void few_rows_conv_prompt(const conv_prompt *p, int64_t num_threads, parallel_fn parallel) {
  conv_work w = {.p = p};
  const int64_t products = p->batch * p->tokens * p->channels * p->conv_size;
  run_threads(NAME(convolve_prompts), &w, min64(num_threads, 1 + products / THREAD_PRODUCTS), parallel);
}

/* Floats of `draft.d.scratch` that the following functions need for this head and number of threads. */
EXPORT int64_t few_rows_draft_scratch(const draft *h, int64_t num_threads) {
  drafting g = {.h = h};
  return divide_scratch(&g, h->d.scratch) - h->d.scratch + num_threads * draft_thread_floats(h);
}

static void run_draft(drafting *g, void (*worker)(void *), int64_t num_threads, parallel_fn parallel,
                      team_size_fn team_size) {
  const draft *const h = g->h;
  const int64_t layers = g->d.num_layers * layer_bytes(&g->d);
  const int64_t bytes = layers + weight_bytes(&h->fuse) + weight_bytes(&h->d.lm_head);
  const int64_t threads = parallel ? min64(num_threads, 1 + bytes / (4 * THREAD_BYTES)) : 1;
  if (threads > 1) g->team.size_of_region = team_size;
  run_threads(worker, g, threads, parallel);
}

/* One forward of a head over committed tokens: sets `root`. */
EXPORT int few_rows_head_forward(const draft *h, int64_t num_threads, parallel_fn parallel,
                                 team_size_fn team_size) {
  drafting g;
  begin_drafting(&g, h);
  begin_forward(&g);
  void (*const worker)(void *) = NAME(head_forward);
  void (*const dspark)(void *) = NAME(dspark_forward);
  run_draft(&g, is_dspark(h) ? dspark : worker, num_threads, parallel, team_size);
  return 1;
}

/* A tree: from `root`, or from `anchors`, to `tree_tokens`, `tree_parents`, `tree_scores`, `tree_mask`. Without levels: the
   block of a DSpark head from `anchors`, to `block_features` and `block_logits`. */
EXPORT int few_rows_draft_tree(const draft *h, int64_t num_threads, parallel_fn parallel,
                               team_size_fn team_size) {
  drafting g;
  begin_drafting(&g, h);
  if (is_dspark(h) && !h->pair_size) begin_block(&g);
  if (h->d.hides_nodes) begin_root(&g);
  run_draft(&g, NAME(draft_tree), h->pair_size ? 1 : num_threads, parallel, team_size);
  return 1;
}

#include "chain_run.h"
#include "trees.h"
