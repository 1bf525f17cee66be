#define SYNCBN_CPU_CAPABILITY baseline
#include "transport/reduce_loops.inc"
