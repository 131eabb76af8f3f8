#include "backend/cpu/cpu.h"

#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

typedef struct isa_choice {
    const cpu_kernels *kernels;
    bool there;
} isa_choice;

#if defined(__x86_64__)
/* __builtin_cpu_supports does not know this feature in every compiler. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

tl_status cpu_kernels_choose(const cpu_kernels **out)
{
    /* fastest first */
    const isa_choice choices[] = {
#if defined(__x86_64__)
        {&cpu_kernels_avx512,
         __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
        {&cpu_kernels_avx2,
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()},
#endif
        {&cpu_kernels_portable, true},
    };
    size_t n = sizeof choices / sizeof *choices;
    const char *wanted = getenv("TINYLOOP_CPU_ISA");
    bool any = wanted == NULL || *wanted == '\0';
    for (size_t i = 0; i < n; i++) {
        if (!any && strcmp(wanted, choices[i].kernels->name) != 0)
            continue;
        if (choices[i].there) {
            *out = choices[i].kernels;
            return TL_STATUS_OK;
        }
        if (!any)
            return tl_fail(TL_STATUS_UNSUPPORTED, "TINYLOOP_CPU_ISA=%s: this processor has no %s",
                           wanted, wanted);
    }
    return tl_fail(TL_STATUS_INVALID, "TINYLOOP_CPU_ISA=%s: allowed are portable%s", wanted,
                   n > 1 ? ", avx2 and avx512" : "");
}
