#define SYNCBN_CPU_CAPABILITY baseline
#include "batch_norm/batch_norm_cpu_loops.inc"
