// Compiled with -mavx2; called only on processors that have it.
#define SYNCBN_CPU_CAPABILITY avx2
#include "resize_loops.inc"
