/* Weights rounded to 8 or 4 bits; included after quantised.h. */

/* The numbers of a group and what an error in each of them costs. */
typedef struct {
  float v[GROUP], cost[GROUP];
} costed_group;

/* Arguments of the threads. */
typedef struct {
  const void *w;
  const float *costs; /* [cols], or NULL for equal ones */
  int64_t w_type;
  weights to;
  int64_t next;
} quantising;

/* Eight numbers rounded to whole ones of `scale`, within the range of a type. */
AVX2_INLINE __m256 whole8(__m256 v, __m256 inverse, __m256 lowest, __m256 highest) {
  const __m256 near = _mm256_round_ps(_mm256_mul_ps(v, inverse), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_min_ps(_mm256_max_ps(near, lowest), highest);
}

/* The best of eight scales for a group of which `extreme` is the number farthest from 0. Each lane tries a divisor,
   close to that which makes it the end of the range; its scale is then that of least squares. */
AVX2_INLINE float best_scale(const costed_group *g, float extreme, float range, __m256 lowest, __m256 highest) {
  const __m256 steps = _mm256_setr_ps(-4, -3, -2, -1, 0, 1, 2, 3);
  const __m256 factor = _mm256_fmadd_ps(steps, _mm256_set1_ps(0.025f), _mm256_set1_ps(1));
  const __m256 inverse = _mm256_mul_ps(factor, _mm256_set1_ps(-range / extreme));
  __m256 product = _mm256_setzero_ps(), square = product, odd_product = product, odd_square = product;
  for (int i = 0; i < GROUP; i += 2) { /* two chains of sums, in registers */
    const __m256 v = _mm256_broadcast_ss(g->v + i), q = whole8(v, inverse, lowest, highest);
    const __m256 w = _mm256_broadcast_ss(g->v + i + 1), p = whole8(w, inverse, lowest, highest);
    const __m256 costed = _mm256_mul_ps(_mm256_broadcast_ss(g->cost + i), q);
    const __m256 odd_costed = _mm256_mul_ps(_mm256_broadcast_ss(g->cost + i + 1), p);
    product = _mm256_fmadd_ps(costed, v, product), odd_product = _mm256_fmadd_ps(odd_costed, w, odd_product);
    square = _mm256_fmadd_ps(costed, q, square), odd_square = _mm256_fmadd_ps(odd_costed, p, odd_square);
  }
  product = _mm256_add_ps(product, odd_product), square = _mm256_add_ps(square, odd_square);
  const __m256 scales = _mm256_div_ps(product, square), gain = _mm256_mul_ps(scales, product); /* of squared error */
  const float best = max8(_mm256_max_ps(gain, _mm256_setzero_ps())); /* a NaN is no gain */
  const int lane = __builtin_ctz((unsigned)_mm256_movemask_ps(_mm256_cmp_ps(gain, _mm256_set1_ps(best), _CMP_EQ_OQ)) | 256);
  float lanes[8];
  _mm256_storeu_ps(lanes, scales);
  return best > 0 && lane < 8 ? lanes[lane] : -extreme / range; /* else no number costs anything */
}

/* The scale, a bfloat16, and the whole numbers [GROUP] of a group, so that the sum of cost times squared error is small. */
AVX2_INLINE float quantise_group(const costed_group *g, int64_t type, int8_t *to) {
  const __m256 highest = _mm256_set1_ps(type == INT8 ? 127 : 7), lowest = _mm256_set1_ps(type == INT8 ? -127 : -8);
  __m256 top = _mm256_setzero_ps(), bottom = top, none = top;
  for (int i = 0; i < GROUP; i += 8) {
    const __m256 v = _mm256_loadu_ps(g->v + i);
    top = _mm256_max_ps(v, top), bottom = _mm256_max_ps(_mm256_sub_ps(_mm256_setzero_ps(), v), bottom);
    none = _mm256_fmadd_ps(v, _mm256_setzero_ps(), none);
  }
  const float high = max8(top), low = max8(bottom), zero = add8(none); /* NaN if a number is not finite */
  const float extreme = high >= low ? high : -low;
  float scale = 0;
  if (fabsf(extreme) > 1e-30f && zero == zero) scale = best_scale(g, extreme, type == INT8 ? 127 : 8, lowest, highest);
  scale = _mm_cvtss_f32(round4(_mm_set_ss(scale), BFLOAT16));
  const __m256 inverse = _mm256_set1_ps(scale == 0 ? 0 : 1 / scale);
  __m256i whole[4];
  for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(whole8(_mm256_loadu_ps(g->v + 8 * i), inverse, lowest, highest));
  const __m256i first = _mm256_packs_epi32(whole[0], whole[1]), second = _mm256_packs_epi32(whole[2], whole[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i *)to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order));
  return scale + zero;
}

/* Store the numbers of one row of a group. */
AVX2_INLINE void store_group(const int8_t *whole, int64_t type, int64_t row, char *data) {
  uint32_t four[GROUP / 4];
  if (type == INT8) {
    memcpy(four, whole, sizeof four);
    for (int i = 0; i < GROUP / 4; i++) memcpy(data + (i * TILE_ROWS + row) * 4, four + i, sizeof *four);
  } else {
    const __m256i positive = _mm256_add_epi8(_mm256_loadu_si256((const __m256i *)whole), _mm256_set1_epi8(8));
    memcpy(four, &positive, sizeof four);
    for (int i = 0; i < GROUP / 8; i++) {
      const uint32_t halves = four[2 * i] | four[2 * i + 1] << 4;
      memcpy(data + (i * TILE_ROWS + row) * 4, &halves, sizeof halves);
    }
  }
}

/* One tile. */
__attribute__((target("avx2,fma,f16c"))) static void quantise_tile(const quantising *q, int64_t tile) {
  const weights *const to = &q->to;
  const int64_t K = to->cols, G = num_groups(K), bytes = bytes_of_rows(q->w_type, 1, K);
  for (int64_t g = 0; g < G; g++) {
    char *const data = (char *)to->data + bytes_of_rows(to->type, TILE_ROWS, GROUP) * (tile * G + g);
    uint16_t *const scales = (uint16_t *)to->scales + (tile * G + g) * TILE_ROWS;
    const int64_t first = g * GROUP, n = min64(GROUP, K - first);
    costed_group from = {0};
    for (int64_t i = 0; i < n; i++) from.cost[i] = q->costs ? q->costs[first + i] : 1;
    for (int64_t r = 0; r < TILE_ROWS; r++) {
      const int64_t row = tile * TILE_ROWS + r;
      int8_t whole[GROUP];
      if (row < to->rows)
        widen((const char *)q->w + row * bytes + bytes_of_rows(q->w_type, 1, first), q->w_type, n, from.v);
      else
        memset(from.v, 0, sizeof from.v);
      const float scale = quantise_group(&from, to->type, whole);
      memcpy(scales + r, (const char *)&scale + 2, sizeof *scales);
      store_group(whole, to->type, r, data);
    }
  }
}

static void quantise_tiles(void *data) {
  quantising *const q = data;
  const int64_t tiles = (q->to.rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t tile = take(&q->next); tile < tiles; tile = take(&q->next)) quantise_tile(q, tile);
}

/* Fill `to`, of type INT8 or INT4, from w [rows, cols] of the float type w_type. */
EXPORT void few_rows_quantise(const void *w, int w_type, const float *costs, const weights *to, int64_t num_threads,
                              parallel_fn parallel) {
  quantising q = {w, costs, w_type, *to, 0};
  if (parallel && num_threads > 1)
    parallel(quantise_tiles, &q, (unsigned)num_threads, 0);
  else
    quantise_tiles(&q);
}
