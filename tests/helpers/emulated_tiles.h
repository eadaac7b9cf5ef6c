/* The tiles of AMX in memory, as Intel's manual describes them, for processors without: the same numbers, slowly. A thread
   that has not configured its tiles is ended by the signal that ends it there (SIGILL). Included as emulated_avx512.h is. */

typedef union {
  float number[16][16];
  uint16_t half[16][32];
} emulated_tile;

static __thread emulated_tile emulated_tiles[8];
static __thread int has_emulated_tiles;

static inline emulated_tile *emulated_tile_at(int number) {
  if (!has_emulated_tiles) __builtin_trap();
  return emulated_tiles + number;
}
static inline void emulated_tile_copy(char *to, int64_t to_step, const char *from, int64_t from_step) {
  for (int i = 0; i < 16; i++) memcpy(to + i * to_step, from + i * from_step, 64);
}
static inline float emulated_flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
static inline float emulated_bfloat16(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return emulated_flushed(x);
}
/* Even and odd columns are added apart, their sum to what is there; without denormals. */
__attribute__((target("fma"))) static void emulated_tile_dpbf16ps(emulated_tile *sum, const emulated_tile *a, const emulated_tile *b) {
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float part[2] = {0, 0};
      for (int k = 0; k < 16; k++)
        for (int i = 0; i < 2; i++) {
          const float x = emulated_bfloat16(a->half[m][2 * k + i]), y = emulated_bfloat16(b->half[k][2 * n + i]);
          part[i] = emulated_flushed(fmaf(x, y, part[i]));
        }
      sum->number[m][n] = emulated_flushed(sum->number[m][n] + emulated_flushed(part[0] + part[1]));
    }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) ((void)(config), has_emulated_tiles = 1)
#define _tile_release() (has_emulated_tiles = 0)
#define _tile_zero(number) memset(emulated_tile_at(number), 0, sizeof(emulated_tile))
#define _tile_loadd(number, from, step) emulated_tile_copy((char *)emulated_tile_at(number), 64, (const char *)(from), step)
#define _tile_stored(number, to, step) emulated_tile_copy((char *)(to), step, (const char *)emulated_tile_at(number), 64)
#define _tile_dpbf16ps(sum, a, b) emulated_tile_dpbf16ps(emulated_tile_at(sum), emulated_tile_at(a), emulated_tile_at(b))
