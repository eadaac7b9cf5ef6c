/* The AVX-512 instructions of few_rows.c by those of AVX2, for processors without them: the same numbers, slowly. Included
   behind the headers of the compiler, whose functions it replaces (emulated_avx512.py). */

typedef union {
  __m512 ps;
  __m512i si;
  __m256 half[2];
  __m256i whole[2];
  __m128i short_half[4];
  float f[16];
  int32_t i[16];
  uint8_t u8[64];
  int8_t s8[64];
} emulated;

#define EMULATED __attribute__((always_inline, target("avx2,fma,f16c"))) static inline
#define OF_HALVES(type, part, name, arguments, values, call) \
  EMULATED type emulated_##name arguments { \
    emulated r; \
    for (int h = 0; h < 2; h++) r.part[h] = call; \
    return r.values; \
  }

OF_HALVES(__m512, half, setzero_ps, (void), ps, _mm256_setzero_ps())
OF_HALVES(__m512, half, set1_ps, (float x), ps, _mm256_set1_ps(x))
OF_HALVES(__m512i, whole, set1_epi32, (int x), si, _mm256_set1_epi32(x))
OF_HALVES(__m512i, whole, set1_epi8, (char x), si, _mm256_set1_epi8(x))
OF_HALVES(__m512, half, loadu_ps, (const void *p), ps, _mm256_loadu_ps((const float *)p + 8 * h))
OF_HALVES(__m512i, whole, loadu_si512, (const void *p), si, _mm256_loadu_si256((const __m256i *)p + h))
#define HALF(x) ((emulated){.ps = x}).half[h]
#define WHOLE(x) ((emulated){.si = x}).whole[h]
OF_HALVES(__m512, half, fmadd_ps, (__m512 a, __m512 b, __m512 c), ps, _mm256_fmadd_ps(HALF(a), HALF(b), HALF(c)))
OF_HALVES(__m512, half, max_ps, (__m512 a, __m512 b), ps, _mm256_max_ps(HALF(a), HALF(b)))
OF_HALVES(__m512, half, mul_ps, (__m512 a, __m512 b), ps, _mm256_mul_ps(HALF(a), HALF(b)))
OF_HALVES(__m512i, whole, add_epi32, (__m512i a, __m512i b), si, _mm256_add_epi32(WHOLE(a), WHOLE(b)))
OF_HALVES(__m512i, whole, and_si512, (__m512i a, __m512i b), si, _mm256_and_si256(WHOLE(a), WHOLE(b)))
OF_HALVES(__m512i, whole, xor_si512, (__m512i a, __m512i b), si, _mm256_xor_si256(WHOLE(a), WHOLE(b)))
OF_HALVES(__m512i, whole, slli_epi32, (__m512i a, int n), si, _mm256_slli_epi32(WHOLE(a), n))
OF_HALVES(__m512i, whole, srli_epi32, (__m512i a, int n), si, _mm256_srli_epi32(WHOLE(a), n))
OF_HALVES(__m512i, whole, srli_epi16, (__m512i a, int n), si, _mm256_srli_epi16(WHOLE(a), n))
OF_HALVES(__m512, half, cvtepi32_ps, (__m512i a), ps, _mm256_cvtepi32_ps(WHOLE(a)))
OF_HALVES(__m512i, whole, cvtepu16_epi32, (__m256i a), si, _mm256_cvtepu16_epi32(((__m128i *)&a)[h]))
OF_HALVES(__m512, half, cvtph_ps, (__m256i a), ps, _mm256_cvtph_ps(((__m128i *)&a)[h]))
EMULATED __m256i emulated_cvtps_ph(__m512 a, int rounding) {
  emulated r;
  (void)rounding; /* always to the nearest */
  for (int h = 0; h < 2; h++) r.short_half[h] = _mm256_cvtps_ph(HALF(a), _MM_FROUND_TO_NEAREST_INT);
  return r.whole[0];
}
EMULATED __m512 emulated_roundscale_ps(__m512 a, int rounding) {
  emulated r;
  (void)rounding;
  for (int h = 0; h < 2; h++) r.half[h] = _mm256_round_ps(HALF(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return r.ps;
}
EMULATED __m512 emulated_scalef_ps(__m512 a, __m512 n) { /* a times 2 to the power of n, rounded down */
  emulated r = {.ps = a}, power = {.ps = n};
  for (int k = 0; k < 16; k++)
    r.f[k] = power.f[k] != power.f[k] ? NAN : ldexpf(r.f[k], (int)floorf(fminf(fmaxf(power.f[k], -400), 400)));
  return r.ps;
}
EMULATED __m512 emulated_mask_mov_ps(__m512 a, unsigned mask, __m512 b) {
  emulated r = {.ps = a}, other = {.ps = b};
  for (int k = 0; k < 16; k++)
    if (mask >> k & 1) r.f[k] = other.f[k];
  return r.ps;
}
EMULATED __m512 emulated_maskz_loadu_ps(unsigned mask, const void *p) {
  emulated r;
  for (int k = 0; k < 16; k++) r.f[k] = mask >> k & 1 ? ((const float *)p)[k] : 0;
  return r.ps;
}
EMULATED void emulated_mask_storeu_ps(void *p, unsigned mask, __m512 a) {
  const emulated r = {.ps = a};
  for (int k = 0; k < 16; k++)
    if (mask >> k & 1) memcpy((float *)p + k, r.f + k, sizeof(float));
}
EMULATED void emulated_mask_cvtepi32_storeu_epi16(void *p, unsigned mask, __m512i a) {
  const emulated r = {.si = a};
  for (int k = 0; k < 16; k++)
    if (mask >> k & 1) memcpy((uint16_t *)p + k, r.i + k, sizeof(uint16_t));
}
EMULATED __m512i emulated_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  emulated r = {.si = sum}, x = {.si = a}, y = {.si = b};
  for (int k = 0; k < 64; k++) r.i[k / 4] += x.u8[k] * y.s8[k];
  return r.si;
}
EMULATED __m256 emulated_no_denormals(__m256 v) {
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
  return _mm256_and_ps(v, _mm256_or_ps(_mm256_cmp_ps(size, _mm256_set1_ps(0x1p-126f), _CMP_NLT_UQ), _mm256_set1_ps(-0.0f)));
}
/* One multiplication and addition for each number of a pair, the upper first; denormals, also of the sums, are zero. */
EMULATED __m512 emulated_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  emulated r, x, y;
  memcpy(&x, &a, sizeof x), memcpy(&y, &b, sizeof y);
  for (int h = 0; h < 2; h++) {
    r.half[h] = emulated_no_denormals(HALF(sum));
    for (int upper = 1; upper >= 0; upper--) {
      const __m256i mask = _mm256_set1_epi32((int)0xffff0000u);
      const __m256i v = upper ? _mm256_and_si256(x.whole[h], mask) : _mm256_slli_epi32(x.whole[h], 16);
      const __m256i w = upper ? _mm256_and_si256(y.whole[h], mask) : _mm256_slli_epi32(y.whole[h], 16);
      const __m256 one = emulated_no_denormals(_mm256_castsi256_ps(v)), other = emulated_no_denormals(_mm256_castsi256_ps(w));
      r.half[h] = emulated_no_denormals(_mm256_fmadd_ps(one, other, r.half[h]));
    }
  }
  return r.ps;
}
EMULATED __m256 emulated_lower(__m512 a) { return ((emulated){.ps = a}).half[0]; }
EMULATED __m256 emulated_upper(__m512 a) { return ((emulated){.ps = a}).half[1]; }
EMULATED __m512i emulated_bits(__m512 a) { return ((emulated){.ps = a}).si; }
EMULATED __m512 emulated_floats(__m512i a) { return ((emulated){.si = a}).ps; }
EMULATED void emulated_storeu_ps(void *p, __m512 a) { memcpy(p, &a, sizeof a); }

#define EMULATED_MASK(a, b, op, h) \
  _mm256_movemask_ps(_mm256_cmp_ps(((emulated){.ps = a}).half[h], ((emulated){.ps = b}).half[h], op))
#define _mm512_cmp_ps_mask(a, b, op) ((unsigned)(EMULATED_MASK(a, b, op, 0) | EMULATED_MASK(a, b, op, 1) << 8))
#define _mm512_castps512_ps256 emulated_lower
#define _mm512_extractf32x8_ps(a, number) emulated_upper(a)
#define _mm512_castps_si512 emulated_bits
#define _mm512_castsi512_ps emulated_floats
