/* AVX2, FMA and F16C: 16 registers of 8 lanes. */
#define SIMD_AVX2
#define TILE_4_VECTORS 1
#define TILE_2_VECTORS 2
#define TILE_QUERIES 2
#include "backend/cpu/kernels.h"

const cpu_kernels cpu_kernels_avx2 = CPU_KERNELS(avx2);
