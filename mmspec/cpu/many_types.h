/* What threads share while they multiply many rows (many_rows.h), with any instruction set. */

#define W_ROWS(lanes) (2 * (lanes))            /* rows of w that are multiplied at once with */
#define X_ROWS(lanes) ((lanes) == 16 ? 12 : 6) /* rows of x: as many sums as there are registers */
#define PART_TILES 8            /* tiles of X_ROWS for which it pays to interleave rows of w */
#define TASKS 4                 /* for each thread, so that all are done at about the same time */
#define MANY_BYTES (4 << 20)    /* of x for which w is read once: they stay in a cache that all cores share */
#define MANY_TILES 40           /* but at least so many tiles */
#define THREAD_PRODUCTS 1000000 /* products for which a further thread pays */

typedef struct {
  const char *from; /* rows of x as they are, of the type of `x` */
  float *packed;    /* the same interleaved, tile by tile */
  float *own;       /* of each thread: rows of w interleaved */
  rows x;           /* those that are multiplied at once */
  part part;
  int64_t parts; /* of the tiles; a thread takes rows of w and one part */
  int64_t next_tile, next, ticket;
} many;

/* Numbers of a row that belong to one partial sum, and floats of those of `width` rows; a line more, so that the partial
   sums do not lie at the same place of a cache. */
static inline int64_t num_steps(int64_t K, int64_t lanes) { return ceil_div(K, lanes); }
static inline int64_t plane(int64_t K, int64_t lanes, int64_t width) { return num_steps(K, lanes) * width + 16; }
