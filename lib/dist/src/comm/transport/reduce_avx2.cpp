// Compiled with -mavx2 -mfma -mf16c; called only on processors that have AVX2 and FMA.
#define SYNCBN_CPU_CAPABILITY avx2
#include "transport/reduce_loops.inc"
