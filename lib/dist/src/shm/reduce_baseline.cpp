#define SYNCBN_CPU_CAPABILITY baseline
#include "shm/reduce_loops.inc"
