/* Plain C: any processor. The compiler vectorises what it can; where there is no fused
 * multiply-add instruction, fmaf() of the C library keeps the bits. */
#define SIMD_PORTABLE
#define TILE_4_VECTORS 1
#define TILE_2_VECTORS 1
#define TILE_QUERIES 2
#include "backend/cpu/kernels.h"

const cpu_kernels cpu_kernels_portable = CPU_KERNELS(portable);
