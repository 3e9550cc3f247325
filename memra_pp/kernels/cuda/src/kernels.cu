// Every kernel of the CUDA backend. Each is the CPU kernel of the same job, operation by operation: the same bits come out, but
// for those of attention.
#include "common.cuh"

#include "blocks.cuh"
#include "append.cuh"
#include "copy.cuh"
#include "rows.cuh"
#include "matmul.cuh"
#include "attention.cuh"
#include "delta.cuh"
