/* AVX-512 (F, BW, DQ, VL): 32 registers of 16 lanes. */
#define SIMD_AVX512
#define TILE_4_VECTORS 4
#define TILE_2_VECTORS 4
#define TILE_QUERIES 8
#include "backend/cpu/kernels.h"

const cpu_kernels cpu_kernels_avx512 = CPU_KERNELS(avx512);
