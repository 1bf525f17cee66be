#define SYNCBN_CPU_CAPABILITY baseline
#include "resize_loops.inc"
