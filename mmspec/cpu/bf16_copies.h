/* A bfloat16 copy of a float32 weight whose numbers are all bfloat16: half the bytes for the same products. Before it is
   read, the float32 weight is compared with what was copied: a product of float32 may check each chunk that it reads, by
   a hash. Included before few_rows.h. */

#define HASHES 8

AVX2_INLINE __m256i add_to_hash(__m256i hash, __m256i bits) {
  bits = _mm256_xor_si256(bits, _mm256_srli_epi32(bits, 16)); /* the low half of a bfloat16 is empty */
  return _mm256_add_epi32(_mm256_mullo_epi32(hash, _mm256_set1_epi32((int)0x9e3779b3u)), bits);
}

/* A hash of n float32 numbers. One number that changes changes it; so do others but for a chance of one in 2^16 or less. */
__attribute__((target("avx2,fma,f16c"))) static int64_t hash_floats(const char *w, int64_t n) {
  const int64_t bytes = 4 * n, step = 32 * HASHES;
  __m256i sum[HASHES];
  uint32_t lanes[8];
  uint64_t hash = (uint64_t)n;
  int64_t i = 0;
  for (int j = 0; j < HASHES; j++) sum[j] = _mm256_set1_epi32(j);
  for (; i + step <= bytes; i += step) {
    _mm_prefetch(w + i + 16 * step, _MM_HINT_T0), _mm_prefetch(w + i + 16 * step + LINE, _MM_HINT_T0);
    _mm_prefetch(w + i + 16 * step + 2 * LINE, _MM_HINT_T0), _mm_prefetch(w + i + 16 * step + 3 * LINE, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int j = 0; j < HASHES; j++) sum[j] = add_to_hash(sum[j], _mm256_loadu_si256((const __m256i *)(w + i + 32 * j)));
  }
  for (; i < bytes; i += 32) {
    __m256i bits = _mm256_setzero_si256();
    memcpy(&bits, w + i, (size_t)min64(32, bytes - i));
    sum[0] = add_to_hash(sum[0], bits);
  }
  for (int j = 0; j < HASHES; j++) {
    _mm256_storeu_si256((__m256i *)lanes, sum[j]);
    for (int l = 0; l < 8; l++) hash = (hash ^ lanes[l]) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
  }
  return (int64_t)hash;
}

/* Let a chunk that is read as float32 tell whether its weight is as it was when it was copied. */
static inline void check_chunk(const chunk *c, int64_t K) {
  if (c->hash && hash_floats(c->w, c->rows * K) != *c->hash) __atomic_store_n(c->is_stale, 1, __ATOMIC_RELAXED);
}

/* Arguments of the threads of `few_rows_copy`. */
typedef struct {
  const weights *w;
  uint16_t *copy;
  int64_t *hashes;
  int64_t next, is_other; /* whether a number is no bfloat16 */
} copying;

__attribute__((target("avx2,fma,f16c"))) static void copy_chunks(void *data) {
  copying *const q = data;
  const int64_t K = q->w->cols, chunks = num_chunks(q->w, q->w->rows);
  for (int64_t n = take(&q->next); n < chunks && !__atomic_load_n(&q->is_other, __ATOMIC_RELAXED); n = take(&q->next)) {
    const int64_t count = min64(CHUNK_ROWS, q->w->rows - n * CHUNK_ROWS) * K;
    const char *const from = (const char *)q->w->data + n * CHUNK_ROWS * K * 4;
    uint16_t *const to = q->copy + n * CHUNK_ROWS * K;
    uint32_t low = 0;
    for (int64_t i = 0; i < count; i++) {
      uint32_t bits;
      memcpy(&bits, from + 4 * i, sizeof bits);
      low |= bits;
      to[i] = (uint16_t)(bits >> 16);
      if (i % 4096 == 4095 && low & 0xffff) break;
    }
    if (low & 0xffff) __atomic_store_n(&q->is_other, 1, __ATOMIC_RELAXED);
    q->hashes[n] = hash_floats(from, count);
  }
}

/* The bfloat16 copy [rows, cols] of a float32 weight, and a hash of each CHUNK_ROWS rows; 0 if a number is no bfloat16. */
EXPORT int few_rows_copy(const weights *w, uint16_t *copy, int64_t *hashes, int64_t num_threads, parallel_fn parallel) {
  copying q = {w, copy, hashes, 0, 0};
  if (parallel && num_threads > 1)
    parallel(copy_chunks, &q, (unsigned)num_threads, 0);
  else
    copy_chunks(&q);
  return !q.is_other;
}
