/* A matrix of weights in any of the types that people load or that we quantise to, and numbers of 16 bits. */

enum { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, BFLOAT16_PAIRS }; /* numbers of weights.py */

#define GROUP 32      /* columns that share a scale */
#define TILE_ROWS 16  /* rows of a quantised weight that lie together */
#define PAIR_COLUMNS 32

/* [rows, cols]. Float types lie row by row. INT8 and INT4 lie in tiles of TILE_ROWS rows, the last filled with zeros, and
   within a tile in groups of GROUP columns, the last filled with zeros: [tile][group][column / 4][row][4] bytes of int8;
   of INT4 [tile][group][column / 8][row][4] bytes, columns 0 to 3 of each eight in their low halves, 4 to 7 in their high
   ones, plus 8. BFLOAT16_PAIRS is BFLOAT16 in a product with rows of that type, computed as in pairs.h. `data` is NULL where
   there is no weight. */
typedef struct {
  const void *data;
  const uint16_t *scales; /* [tile][group][row] bfloat16 of INT8 and INT4; else NULL */
  const int64_t *hashes;  /* of FLOAT32: of each chunk (bf16_copies.h), to be compared when it is read; NULL for none */
  int64_t *is_stale;      /* set to 1 if one of them differs */
  int64_t rows, cols, type;
} weights;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int is_quantised(int64_t type) { return type == INT8 || type == INT4; }
static inline int64_t num_groups(int64_t K) { return ceil_div(K, GROUP); }
static inline int64_t pair_floats(int64_t K) { return ceil_div(K, PAIR_COLUMNS) * 16; } /* of a packed row */
static inline int64_t float_bytes(int64_t type) { return type == FLOAT32 ? 4 : 2; }

/* Bytes of `rows` rows, a multiple of TILE_ROWS for quantised types; scales not counted. */
static inline int64_t bytes_of_rows(int64_t type, int64_t rows, int64_t K) {
  if (!is_quantised(type)) return rows * K * float_bytes(type);
  return rows * num_groups(K) * (type == INT8 ? GROUP : GROUP / 2);
}

static inline int64_t weight_bytes(const weights *w) { return w->data ? bytes_of_rows(w->type, w->rows, w->cols) : 0; }

#define AVX2_INLINE __attribute__((always_inline, target("avx2,fma,f16c"))) static inline

/* Four numbers rounded to a type, to the nearest, of two as near to the even one. */
AVX2_INLINE __m128 round4(__m128 x, int64_t type) {
  if (type == FLOAT16) return _mm_cvtph_ps(_mm_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  if (type != BFLOAT16) return x;
  const __m128i bits = _mm_castps_si128(x), odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  const __m128i up = _mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff)));
  const __m128 rounded = _mm_castsi128_ps(_mm_and_si128(up, _mm_set1_epi32((int)0xffff0000u)));
  return _mm_blendv_ps(rounded, _mm_set1_ps(NAN), _mm_cmpunord_ps(x, x));
}

/* Eight numbers, as by `round4`. */
AVX2_INLINE __m256 round8(__m256 x, int64_t type) {
  if (type == FLOAT16) return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  if (type != BFLOAT16) return x;
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 rounded = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32((int)0xffff0000u)));
  return _mm256_blendv_ps(rounded, _mm256_set1_ps(NAN), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* Four numbers that have a type of 16 bits, in its bits. */
AVX2_INLINE __m128i narrow4(__m128 x, int64_t type) {
  if (type == FLOAT16) return _mm_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm_srli_epi32(_mm_castps_si128(x), 16);
  return _mm_packus_epi32(high, high);
}

AVX2_INLINE float round1(float x, int64_t type) {
  return type == FLOAT32 ? x : _mm_cvtss_f32(round4(_mm_set_ss(x), type));
}

/* n numbers that have a float type, in its bits. */
__attribute__((target("avx2,fma,f16c"))) static void narrow(const float *from, int64_t type, int64_t n, void *to) {
  uint16_t *const out = to;
  if (type == FLOAT32) {
    memcpy(to, from, (size_t)n * sizeof(float));
    return;
  }
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) _mm_storel_epi64((__m128i *)(out + i), narrow4(_mm_loadu_ps(from + i), type));
  for (; i < n; i++) out[i] = (uint16_t)_mm_cvtsi128_si32(narrow4(_mm_load_ss(from + i), type));
}

/* n numbers of a float type as float32. */
__attribute__((target("avx2,fma,f16c"))) static void widen(const void *from, int64_t type, int64_t n, float *to) {
  const uint16_t *const narrow = from;
  int64_t i = 0;
  if (type == FLOAT32) {
    memcpy(to, from, (size_t)n * sizeof(float));
    return;
  }
  for (; i + 8 <= n; i += 8) {
    const __m128i v = _mm_loadu_si128((const __m128i *)(narrow + i));
    const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16);
    _mm256_storeu_ps(to + i, type == FLOAT16 ? _mm256_cvtph_ps(v) : _mm256_castsi256_ps(high));
  }
  for (; i < n; i++) {
    const __m128i v = _mm_cvtsi32_si128(narrow[i]);
    _mm_store_ss(to + i, type == FLOAT16 ? _mm_cvtph_ps(v) : _mm_castsi128_ps(_mm_slli_epi32(v, 16)));
  }
}

/* One row of a weight of a float type as float32, such as an embedding. */
static void widen_row(const weights *w, int64_t row, float *to) {
  widen((const char *)w->data + bytes_of_rows(w->type, row, w->cols), w->type, w->cols, to);
}

/* Eight numbers of a float type as float32. */
AVX2_INLINE __m256 load8(const char *from, const int type) {
  if (type == FLOAT32) return _mm256_loadu_ps((const float *)from);
  const __m128i v = _mm_loadu_si128((const __m128i *)from);
  return type == FLOAT16 ? _mm256_cvtph_ps(v) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

/* The first n < 8 of them, then zeros. */
AVX2_INLINE __m256 load_first(const char *from, int64_t n, const int type) {
  char part[8 * sizeof(float)] = {0};
  memcpy(part, from, (size_t)(n * float_bytes(type)));
  return load8(part, type);
}

/* Eight rows of eight numbers to their columns. */
AVX2_INLINE void transpose8(__m256 *v) {
  __m256 pair[8], four[8];
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    pair[2 * i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
    pair[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    four[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44), four[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xee);
    four[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
    four[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_permute2f128_ps(four[i], four[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(four[i], four[i + 4], 0x31);
  }
}
