// Compiled with -mavx2 -mfma; called only on processors that have both.
#define SYNCBN_CPU_CAPABILITY avx2
#include "batch_norm/batch_norm_cpu_loops.inc"
