/* Attention in bfloat16 by tiles; included by attention.h.

   A score is the same number for any tree, since it depends on one query and one key alone. A sum of values is one for any
   tree if the positions that tiles add up are the same for a node wherever its ancestors are, committed or in the tree:
   those more than MAX_NODES before the node, which are committed always, in blocks that are counted from the row's first
   position. What follows is added position by position. */

#define BLOCK 32          /* positions that a tile adds up */
#define BLOCK_POSITIONS 256 /* whose values are kept in tiles */
_Static_assert(PART % BLOCK == 0 && BLOCK == 2 * MAX_LANES, "blocks are the same for all lengths of a cache");

/* Positions of a stretch whose values reach a node by tiles: the first so many. */
static int64_t tiled_positions(const decoder *d, const stretch *p, int64_t node) {
  const int64_t depth = d->depths ? d->depths[p->b * d->nodes + node] : 0;
  const int64_t count = min64(d->lengths[p->b] + depth - MAX_NODES, p->end) - p->begin;
  return max64(count, 0) / BLOCK * BLOCK;
}

/* Scores of `num_queries` queries in pairs, `step` numbers apart, with the keys of a tile [head_dim / 2, BLOCK]. `out` of
   16 queries at a time, `width` numbers apart, is overwritten. */
__attribute__((target(ISA))) static void score_by_tiles(const float *queries, int64_t num_queries, int64_t step,
                                                        const float *tile, int64_t pairs, float *out, int64_t width) {
  __asm__ volatile("" ::"r"(tile), "r"(queries) : "memory"); /* the compiler does not know what a tile reads */
  for (int64_t i = 0; i < num_queries; i += TILE_ROWS) {
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t k = 0; k < pairs; k += TILE_ROWS) {
      _tile_loadd(0, queries + i * step + k, 4 * step);
      _tile_loadd(1, tile + k * BLOCK, 4 * BLOCK);
      _tile_dpbf16ps(4, 0, 1);
      _tile_loadd(2, tile + k * BLOCK + TILE_ROWS, 4 * BLOCK);
      _tile_dpbf16ps(5, 0, 2);
    }
    _tile_stored(4, out + i * width, 4 * width);
    _tile_stored(5, out + i * width + TILE_ROWS, 4 * width);
  }
}

/* Weights in pairs of at most 16 queries for a block, 0 of those that do not take it by tiles. */
static const float *weights_of_block(const float *weights, int64_t width, const int64_t *own, int64_t count, int64_t end,
                                     float (*some)[BLOCK / 2]) {
  int64_t taken = 0;
  for (int64_t i = 0; i < count; i++) taken += own[i] >= end;
  if (taken == count) return NULL;
  memset(some, 0, TILE_ROWS * sizeof *some);
  for (int64_t i = 0; i < count; i++)
    if (own[i] >= end) memcpy(some[i], weights + i * width, sizeof *some);
  __asm__ volatile("" ::"r"(some) : "memory");
  return some[0];
}

/* Weights in pairs [queries, width] of consecutive queries from `first` on times the values of the positions that they
   take by tiles, to `out` [queries, `to_next`]; these weights become 0. Returns the position from which on values are still
   to be added. */
__attribute__((target(ISA))) static int64_t weigh_by_tiles(const decoder *d, const stretch *p, int64_t first,
                                                           float *weights, int64_t num_queries, int64_t width,
                                                           const char *values, float *tile, float *out, int64_t to_next) {
  const int64_t D = d->head_dim;
  int64_t own[MANY_QUERIES], least = INT64_MAX, most = 0;
  float sums[TILE_ROWS][4 * TILE_ROWS] __attribute__((aligned(64))), some[TILE_ROWS][BLOCK / 2] __attribute__((aligned(64)));
  for (int64_t i = 0; i < num_queries; i++) {
    own[i] = tiled_positions(d, p, (first + i) % d->nodes);
    least = min64(least, own[i]), most = max64(most, own[i]);
  }
  for (int64_t begin = 0; begin < most; begin += BLOCK_POSITIONS) {
    const int64_t end = min64(begin + BLOCK_POSITIONS, most);
    avx512_pair_values(values + begin * D * 2, end - begin, D, D, tile);
    for (int64_t i = 0; i < num_queries; i += TILE_ROWS) {
      const int64_t count = min64(TILE_ROWS, num_queries - i);
      for (int64_t k = 0; k < D; k += 4 * TILE_ROWS) {
        const int64_t columns = min64(4 * TILE_ROWS, D - k);
        for (int64_t r = 0; r < count; r++) memcpy(sums[r], out + (i + r) * to_next + k, (size_t)columns * sizeof(float));
        __asm__ volatile("" ::"r"(sums) : "memory");
        _tile_loadd(4, sums[0], sizeof sums[0]);
        _tile_loadd(5, sums[0] + 16, sizeof sums[0]);
        _tile_loadd(6, sums[0] + 32, sizeof sums[0]);
        _tile_loadd(7, sums[0] + 48, sizeof sums[0]);
        for (int64_t t = begin; t < end; t += BLOCK) {
          const float *const row = weights + i * width + t / 2, *const at = tile + (t - begin) / 2 * D + k;
          const float *const masked = weights_of_block(row, width, own + i, count, t + BLOCK, some);
          if (masked)
            _tile_loadd(0, masked, sizeof some[0]);
          else
            _tile_loadd(0, row, 4 * width);
          _tile_loadd(1, at, 4 * D);
          _tile_dpbf16ps(4, 0, 1);
          _tile_loadd(2, at + 16, 4 * D);
          _tile_dpbf16ps(5, 0, 2);
          if (columns <= 32) continue;
          _tile_loadd(1, at + 32, 4 * D);
          _tile_dpbf16ps(6, 0, 1);
          if (columns <= 48) continue;
          _tile_loadd(2, at + 48, 4 * D);
          _tile_dpbf16ps(7, 0, 2);
        }
        _tile_stored(4, sums[0], sizeof sums[0]);
        _tile_stored(5, sums[0] + 16, sizeof sums[0]);
        _tile_stored(6, sums[0] + 32, sizeof sums[0]);
        _tile_stored(7, sums[0] + 48, sizeof sums[0]);
        for (int64_t r = 0; r < count; r++) memcpy(out + (i + r) * to_next + k, sums[r], (size_t)columns * sizeof(float));
      }
    }
  }
  for (int64_t i = 0; i < num_queries; i++)
    if (own[i] > least) memset(weights + i * width + least / 2, 0, (size_t)(own[i] - least) / 2 * sizeof(float));
  return least;
}
