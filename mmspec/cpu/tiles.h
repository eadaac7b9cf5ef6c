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

/* Tile `to` of at most TILE_ROWS rows of w, of which at most PAIR_COLUMNS columns are taken. Nothing behind the weight is
   read. */
#define LOAD_WEIGHTS(to, from, count) \
  if (columns < PAIR_COLUMNS || (count) < TILE_ROWS) { \
    memset(part, 0, sizeof part); \
    for (int64_t i = 0; i < (count); i++) memcpy(part[i], (from) + i * row_bytes, (size_t)(2 * columns)); \
    __asm__ volatile("" ::"r"(part) : "memory"); \
    _tile_loadd(to, part, sizeof part[0]); \
  } else { \
    _tile_loadd(to, from, row_bytes); \
  }

/* The product of at most MAX_ROWS rows with one chunk: two tiles of w by two of x, so that each is loaded once for two. */
__attribute__((target(ISA))) static void multiply_pairs(const product *p, const chunk *c) {
  const int64_t K = p->K, row_bytes = 2 * K, low = min64(c->rows, TILE_ROWS), high = c->rows - low;
  const int is_wide = p->R > TILE_ROWS;
  const float *x = p->packed, *const other = x + TILE_ROWS * pair_floats(K);
  float sums[2][2][TILE_ROWS][TILE_ROWS] __attribute__((aligned(64))); /* [of w][of x][row of w][row of x] */
  char part[TILE_ROWS][64] __attribute__((aligned(64)));
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t k = 0; k < K; k += PAIR_COLUMNS, x += TILE_ROWS * 16) {
    const int64_t columns = min64(PAIR_COLUMNS, K - k), ahead = 2 * k + LINES_AHEAD * LINE;
    const char *const w = c->w + 2 * k;
    const char *const next = ahead < row_bytes ? c->w + ahead : c->next ? c->next + ahead - row_bytes : NULL;
    for (int64_t i = 0; next && i < (ahead < row_bytes ? c->rows : c->next_rows); i++)
      _mm_prefetch(next + i * row_bytes, _MM_HINT_T0);
    LOAD_WEIGHTS(0, w, low)
    _tile_loadd(2, x, 64);
    _tile_dpbf16ps(4, 0, 2);
    if (high) {
      LOAD_WEIGHTS(1, w + TILE_ROWS * row_bytes, high)
      _tile_dpbf16ps(6, 1, 2);
    }
    if (!is_wide) continue;
    _tile_loadd(3, other + (x - p->packed), 64);
    _tile_dpbf16ps(5, 0, 3);
    if (high) _tile_dpbf16ps(7, 1, 3);
  }
  _tile_stored(4, sums[0][0], 64);
  _tile_stored(5, sums[0][1], 64);
  _tile_stored(6, sums[1][0], 64);
  _tile_stored(7, sums[1][1], 64);
  for (int64_t first = 0; first < p->R; first += 8) {
    float rows[8][2 * TILE_ROWS] __attribute__((aligned(64)));
    for (int64_t m = 0; m < c->rows; m += 8) {
      __m256 v[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++)
        v[i] = _mm256_loadu_ps(&sums[m / TILE_ROWS][first / TILE_ROWS][m % TILE_ROWS + i][first % TILE_ROWS]);
      transpose8(v);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) _mm256_store_ps(rows[i] + m, v[i]);
    }
    for (int64_t r = first; r < min64(first + 8, p->R); r++)
      for (int64_t m = 0; m < c->rows; m += TILE_ROWS) finish_sums(p->x, c, r, m, rows[r - first] + m);
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
