/* The kernels, written once over the sixteen lanes of simd.h. Each isa_*.c compiles them for its
 * instruction set, and tells the shapes of its register tiles to linear.h and attend.h. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/simd.h"

#include "backend/cpu/attend.h"
#include "backend/cpu/linear.h"
#include "backend/cpu/rows.h"

#define CPU_KERNELS(set)                                                                           \
    {                                                                                              \
        .name = #set, .linear = linear, .rms_norm = rms_norm, .activate = activate,                \
        .sigmoid_mul = sigmoid_mul, .dot = dot, .attend = attend, .store_kv = store_kv,            \
    }
