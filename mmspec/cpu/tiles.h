/* The products of pairs.h by the tiles of AMX (TDPBF16PS), which multiply 16 rows of w with 16 of x and 32 columns at once.

   Rows of w are loaded where they lie, so a tile of sums holds out transposed. An element of out is summed by the same
   instructions in the same order whatever the other rows: of each 32 columns the odd ones and the even ones apart, their sum
   added to those before; denormals are zero. */

#define LINES_AHEAD (512 / LINE) /* of each row of w that are prefetched */

/* What surrounds the work of a thread: Linux saves tiles that are in use with every switch of threads. */
__attribute__((target(ISA))) static void with_tiles(const region *r) {
  struct {
    uint8_t palette, start, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } tiles = {.palette = 1};
  for (int i = 0; i < 8; i++) tiles.row_bytes[i] = 64, tiles.rows[i] = 16;
  __asm__ volatile("" ::"r"(&tiles) : "memory"); /* the compiler believes that the next line reads 8 bytes */
  _tile_loadconfig(&tiles);
  r->worker(r->data);
  _tile_release();
}

/* The product of at most MAX_ROWS rows with one chunk. */
__attribute__((target(ISA))) static void multiply_pairs(const product *p, const chunk *c) {
  const int64_t K = p->K, row_bytes = 2 * K, count = c->rows;
  const float *x = p->packed, *const other = x + TILE_ROWS * pair_floats(K);
  float sums[2][TILE_ROWS][16] __attribute__((aligned(64)));
  char part[TILE_ROWS][64] __attribute__((aligned(64)));
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < K; k += PAIR_COLUMNS, x += TILE_ROWS * 16) {
    const int64_t columns = min64(PAIR_COLUMNS, K - k), ahead = 2 * k + LINES_AHEAD * LINE;
    const char *w = c->w + 2 * k, *const next = ahead < row_bytes ? c->w + ahead : c->next ? c->next + ahead - row_bytes : NULL;
    int64_t step = row_bytes;
    for (int64_t i = 0; next && i < (ahead < row_bytes ? count : c->next_rows); i++)
      _mm_prefetch(next + i * row_bytes, _MM_HINT_T0);
    if (columns < PAIR_COLUMNS || count < TILE_ROWS) { /* nothing behind the weight is read */
      memset(part, 0, sizeof part);
      for (int64_t i = 0; i < count; i++) memcpy(part[i], w + i * row_bytes, (size_t)(2 * columns));
      __asm__ volatile("" ::"r"(part) : "memory");
      w = part[0], step = sizeof part[0];
    }
    _tile_loadd(0, w, step);
    _tile_loadd(1, x, 64);
    _tile_dpbf16ps(2, 0, 1);
    if (p->R <= TILE_ROWS) continue;
    _tile_loadd(4, other + (x - p->packed), 64);
    _tile_dpbf16ps(3, 0, 4);
  }
  _tile_stored(2, sums[0], 64);
  _tile_stored(3, sums[1], 64);
  for (int64_t r = 0; r < p->R; r++)
    for (int64_t m = 0; m < count; m += 4) {
      const float *const sum = &sums[r / TILE_ROWS][m][r % TILE_ROWS];
      finish(p, c, r, m, min64(4, count - m), _mm_setr_ps(sum[0], sum[16], sum[32], sum[48]));
    }
}

/* Eight pairs of columns, of which `count` columns are there. */
INLINE __m256 load_eight_pairs(const char *from, int64_t count, const int type) {
  float part[16] = {0};
  if (count < 16) from = memcpy(part, from, (size_t)(max64(count, 0) * float_bytes(type)));
  if (type == BFLOAT16) return _mm256_loadu_ps((const float *)from);
  const __m256i low = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)from), 16);
  const __m256i high = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)(from + 32)), 16);
  return _mm256_castsi256_ps(_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
}

/* Rows [R, K] as tiles read them: [row / 16][column / 32][pair of columns][row of the tile][2] numbers of bfloat16, zeros
   where there are none. They have that type, or are float32 numbers that it holds. */
INLINE void interleave_of_type(const char *from, const int type, int64_t R, int64_t K, float *to) {
  const int64_t bytes = float_bytes(type);
  for (int64_t first = 0; first < R; first += TILE_ROWS)
    for (int64_t k = 0; k < pair_floats(K) * 2; k += 16, to += 8 * TILE_ROWS)
      for (int64_t half = 0; half < TILE_ROWS; half += 8) {
        __m256 v[8];
        for (int i = 0; i < 8; i++) {
          const int64_t r = first + half + i;
          v[i] = r < R ? load_eight_pairs(from + (r * K + min64(k, K)) * bytes, K - k, type) : _mm256_setzero_ps();
        }
        transpose8(v);
        for (int i = 0; i < 8; i++) _mm256_storeu_ps(to + i * TILE_ROWS + half, v[i]);
      }
}

__attribute__((target(ISA))) static void interleave_pairs(const void *from, int type, int64_t R, int64_t K, float *to) {
  if (type == BFLOAT16)
    interleave_of_type(from, BFLOAT16, R, K, to);
  else
    interleave_of_type(from, FLOAT32, R, K, to);
}
