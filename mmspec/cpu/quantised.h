/* Products with weights of 8 and 4 bits, and the rounding of rows to 8; included before few_rows.h.

   A row of x is rounded to 8 bits in groups of GROUP columns, each with a scale. The sum of a group's products is a whole
   number and therefore exact in any order; groups are added in float32, in ascending order. So AVX2 and VNNI give the same
   bits. */

#define VNNI "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c"
#define VNNI_INLINE __attribute__((always_inline, target(VNNI))) static inline
#define AHEAD_QUANTISED (4 << 10) /* bytes between the weights in use and those that are prefetched */
#define AVX2_ROWS 4               /* rows of x in one tile */
#define VNNI_ROWS 8

/* GROUP numbers of a row of x, rounded; the last ones zero. */
typedef struct {
  float scale; /* NaN where a number is not finite */
  int32_t sum; /* of `x` */
  int8_t x[GROUP];
} group;

AVX2_INLINE float add8(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

AVX2_INLINE float max8(__m256 v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

AVX2_INLINE __m256 abs8(__m256 v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }

/* v [GROUP] rounded to 8 bits. */
AVX2_INLINE void round_group(const float *v, group *to) {
  __m256 part[4], top = _mm256_setzero_ps(), none = _mm256_setzero_ps();
  for (int i = 0; i < 4; i++) {
    part[i] = _mm256_loadu_ps(v + 8 * i);
    top = _mm256_max_ps(abs8(part[i]), top);
    none = _mm256_fmadd_ps(part[i], _mm256_setzero_ps(), none); /* 0, or NaN if a number is not finite */
  }
  const float largest = max8(top), zero = add8(none);
  const int is_zero = !(largest > 1e-30f) || zero != zero;
  const __m256 inverse = _mm256_set1_ps(is_zero ? 0 : 127 / largest);
  __m256i whole[4], sums = _mm256_setzero_si256();
  for (int i = 0; i < 4; i++) {
    whole[i] = zero != zero ? _mm256_setzero_si256() : _mm256_cvtps_epi32(_mm256_mul_ps(part[i], inverse));
    sums = _mm256_add_epi32(sums, whole[i]);
  }
  const __m256i low = _mm256_packs_epi32(whole[0], whole[1]), high = _mm256_packs_epi32(whole[2], whole[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  _mm256_storeu_si256((__m256i *)to->x, bytes);
  int32_t lanes[8];
  _mm256_storeu_si256((__m256i *)lanes, sums);
  to->sum = 0;
  for (int i = 0; i < 8; i++) to->sum += lanes[i];
  to->scale = (is_zero ? 0 : largest / 127) + zero;
}

/* Rows of x [R, K], each first normalised as by `pack` if there is `norm`. */
__attribute__((target("avx2,fma,f16c"))) static void round_rows(const float *x, int64_t R, int64_t K, const float *norm,
                                                                float eps, group *to) {
  for (int64_t r = 0; r < R; r++, x += K) {
    float factor = 1, v[GROUP];
    if (norm) {
      __m256 sum = _mm256_setzero_ps();
      int64_t k = 0;
      for (; k + 8 <= K; k += 8) sum = _mm256_fmadd_ps(_mm256_loadu_ps(x + k), _mm256_loadu_ps(x + k), sum);
      float total = add8(sum);
      for (; k < K; k++) total += x[k] * x[k];
      factor = 1.0f / sqrtf(total / (float)K + eps);
    }
    for (int64_t k = 0; k < K; k += GROUP, to++) {
      const int64_t n = min64(GROUP, K - k);
      if (n < GROUP) memset(v, 0, sizeof v);
      memcpy(v, x + k, (size_t)n * sizeof(float));
      for (int64_t i = 0; norm && i < n; i += 8) { /* what is behind the end of v is not there: GROUP is a multiple of 8 */
        const __m256 weight = n - i < 8 ? load_first((const char *)(norm + k + i), n - i, FLOAT32) : _mm256_loadu_ps(norm + k + i);
        _mm256_storeu_ps(v + i, _mm256_mul_ps(weight, _mm256_mul_ps(_mm256_loadu_ps(v + i), _mm256_set1_ps(factor))));
      }
      round_group(v, to);
    }
  }
}

/* What to prefetch while a group of a chunk is multiplied. */
static inline const char *ahead_of(const chunk *c, int64_t offset, int64_t bytes) {
  offset += AHEAD_QUANTISED;
  return offset < bytes ? c->w + offset : c->next ? c->next + (offset - bytes) : c->w;
}

/* Eight scales. */
AVX2_INLINE __m256 scales8(const uint16_t *scales) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)scales)), 16));
}

AVX2_INLINE __m256i four_of(const group *x, int k) {
  int32_t four;
  memcpy(&four, x->x + k, sizeof four);
  return _mm256_set1_epi32(four);
}

/* The sums of the products of a group of TILE_ROWS rows of weights of 4 bits with X rows of x, of which each is G groups. */
AVX2_INLINE void avx2_group4(const char *w, const group *x, int64_t G, __m256i sum[AVX2_ROWS][2], const int X) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
  for (int r = 0; r < X; r++) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 1 /* else gcc adds the products late, and keeps them in memory until then */
  for (int k = 0; k < GROUP; k += 8, w += 64) { /* of 16 bits, which suffice: 8 * 2 * 15 * 127 */
    const __m256i a = _mm256_loadu_si256((const __m256i *)w), b = _mm256_loadu_si256((const __m256i *)w + 1);
    const __m256i a0 = _mm256_and_si256(a, low), a4 = _mm256_and_si256(_mm256_srli_epi16(a, 4), low);
    const __m256i b0 = _mm256_and_si256(b, low), b4 = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
#pragma GCC unroll 4
    for (int r = 0; r < X; r++) {
      const __m256i x0 = four_of(x + r * G, k), x4 = four_of(x + r * G, k + 4);
      sum[r][0] = _mm256_add_epi16(sum[r][0], _mm256_maddubs_epi16(a0, x0));
      sum[r][0] = _mm256_add_epi16(sum[r][0], _mm256_maddubs_epi16(a4, x4));
      sum[r][1] = _mm256_add_epi16(sum[r][1], _mm256_maddubs_epi16(b0, x0));
      sum[r][1] = _mm256_add_epi16(sum[r][1], _mm256_maddubs_epi16(b4, x4));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < X; r++)
    for (int h = 0; h < 2; h++)
      sum[r][h] = _mm256_sub_epi32(_mm256_madd_epi16(sum[r][h], ones), _mm256_set1_epi32(8 * x[r * G].sum));
}

/* The same for weights of 8 bits. */
AVX2_INLINE void avx2_group8(const char *w, const group *x, int64_t G, __m256i sum[AVX2_ROWS][2], const int X) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
  for (int r = 0; r < X; r++) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
  for (int k = 0; k < GROUP; k += 4, w += 64) {
    const __m256i v[2] = {_mm256_loadu_si256((const __m256i *)w), _mm256_loadu_si256((const __m256i *)w + 1)};
    const __m256i size[2] = {_mm256_abs_epi8(v[0]), _mm256_abs_epi8(v[1])};
#pragma GCC unroll 4
    for (int r = 0; r < X; r++) {
      const __m256i four = four_of(x + r * G, k);
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const __m256i pairs = _mm256_maddubs_epi16(size[h], _mm256_sign_epi8(four, v[h]));
        sum[r][h] = _mm256_add_epi32(sum[r][h], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
}

/* One chunk and X rows of x; the chunk is prefetched for the first ones only. */
AVX2_INLINE void avx2_tile_quantised(const product *p, const chunk *c, int64_t row, const int X, const int type) {
  const int64_t G = num_groups(p->K), step = type == INT8 ? 512 : 256;
  const group *x = (const group *)p->packed + row * G;
  __m256 total[AVX2_ROWS][2];
  for (int r = 0; r < X; r++) total[r][0] = total[r][1] = _mm256_setzero_ps();
  for (int64_t g = 0; g < G; g++, x++) {
    const char *const ahead = ahead_of(c, g * step, G * step);
    const uint16_t *const scales = c->scales + g * TILE_ROWS;
    __m256i sum[AVX2_ROWS][2];
    for (int64_t i = 0; row == 0 && i < step; i += LINE) _mm_prefetch(ahead + i, _MM_HINT_T0);
    if (type == INT8)
      avx2_group8(c->w + g * step, x, G, sum, X);
    else
      avx2_group4(c->w + g * step, x, G, sum, X);
    const __m256 scale[2] = {scales8(scales), scales8(scales + 8)};
#pragma GCC unroll 4
    for (int r = 0; r < X; r++)
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const __m256 factor = _mm256_mul_ps(scale[h], _mm256_set1_ps(x[r * G].scale));
        total[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][h]), factor, total[r][h]);
      }
  }
  for (int r = 0; r < X; r++)
    for (int64_t m = 0; m < c->rows; m += 4) {
      const __m256 half = total[r][m / 8];
      const __m128 four = m % 8 ? _mm256_extractf128_ps(half, 1) : _mm256_castps256_ps128(half);
      finish(p, c, row + r, m, min64(4, c->rows - m), four);
    }
}

AVX2_INLINE void avx2_tile_of_bits(const product *p, const chunk *c, int64_t row, int64_t X, const int type) {
  switch (X) {
    case 1: avx2_tile_quantised(p, c, row, 1, type); break;
    case 2: avx2_tile_quantised(p, c, row, 2, type); break;
    case 3: avx2_tile_quantised(p, c, row, 3, type); break;
    default: avx2_tile_quantised(p, c, row, 4, type);
  }
}

/* The product of at most MAX_ROWS rows with one chunk of a quantised weight. */
__attribute__((target("avx2,fma,f16c"))) static void avx2_multiply_quantised(const product *p, const chunk *c) {
  const int64_t tiles = ceil_div(p->R, AVX2_ROWS);
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t row = p->R * t / tiles, X = p->R * (t + 1) / tiles - row;
    if (c->type == INT8)
      avx2_tile_of_bits(p, c, row, X, INT8);
    else
      avx2_tile_of_bits(p, c, row, X, INT4);
  }
}

/* As `avx2_tile_quantised`. */
VNNI_INLINE void vnni_tile_quantised(const product *p, const chunk *c, int64_t row, const int X, const int type) {
  const int64_t G = num_groups(p->K), step = type == INT8 ? 512 : 256;
  const int columns = type == INT8 ? 4 : 8, bias = type == INT8 ? 128 : 8;
  const __m512i low = _mm512_set1_epi8(15), top = _mm512_set1_epi8((char)0x80);
  const group *x = (const group *)p->packed + row * G;
  __m512 total[VNNI_ROWS];
  for (int r = 0; r < X; r++) total[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < G; g++, x++) {
    const char *const ahead = ahead_of(c, g * step, G * step), *w = c->w + g * step;
    __m512i sum[VNNI_ROWS];
    for (int64_t i = 0; row == 0 && i < step; i += LINE) _mm_prefetch(ahead + i, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int r = 0; r < X; r++) sum[r] = _mm512_set1_epi32(-bias * x[r * G].sum);
#pragma GCC unroll 1
    for (int k = 0; k < GROUP; k += columns, w += 64) {
      const __m512i v = _mm512_loadu_si512(w);
      const __m512i first = type == INT8 ? _mm512_xor_si512(v, top) : _mm512_and_si512(v, low);
      const __m512i second = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
#pragma GCC unroll 8
      for (int r = 0; r < X; r++) {
        int32_t four[2];
        memcpy(four, x[r * G].x + k, (size_t)columns);
        sum[r] = _mm512_dpbusd_epi32(sum[r], first, _mm512_set1_epi32(four[0]));
        if (type == INT4) sum[r] = _mm512_dpbusd_epi32(sum[r], second, _mm512_set1_epi32(four[1]));
      }
    }
    const __m256i narrow = _mm256_loadu_si256((const __m256i *)(c->scales + g * TILE_ROWS));
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
#pragma GCC unroll 8
    for (int r = 0; r < X; r++) {
      const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(x[r * G].scale));
      total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), factor, total[r]);
    }
  }
  for (int r = 0; r < X; r++) {
    float lanes[TILE_ROWS];
    _mm512_storeu_ps(lanes, total[r]);
    for (int64_t m = 0; m < c->rows; m += 4) finish(p, c, row + r, m, min64(4, c->rows - m), _mm_loadu_ps(lanes + m));
  }
}

VNNI_INLINE void vnni_tile_of_bits(const product *p, const chunk *c, int64_t row, int64_t X, const int type) {
  for (int64_t n; X; row += n, X -= n) { /* eight rows at once, then as many as are left */
    n = X >= 8 ? 8 : X >= 4 ? 4 : X >= 2 ? 2 : 1;
    if (n == 8) vnni_tile_quantised(p, c, row, 8, type);
    if (n == 4) vnni_tile_quantised(p, c, row, 4, type);
    if (n == 2) vnni_tile_quantised(p, c, row, 2, type);
    if (n == 1) vnni_tile_quantised(p, c, row, 1, type);
  }
}

__attribute__((target(VNNI))) static void vnni_multiply_quantised(const product *p, const chunk *c) {
  if (c->type == INT8)
    vnni_tile_of_bits(p, c, 0, p->R, INT8);
  else
    vnni_tile_of_bits(p, c, 0, p->R, INT4);
}

static int has_vnni(void) { return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"); }
