/* Ends the definitions of few_rows.c for one instruction set. */

#undef INLINE
#undef NAME
#undef ISA
#undef LANES
#undef TILE
#undef VEC
#undef ZERO
#undef SET1
#undef LOAD
#undef STORE
#undef FMA
#undef MAX
#undef ANY_ABOVE
#undef HALVES
#undef WIDEN_BFLOAT16
#undef WIDEN_FLOAT16
