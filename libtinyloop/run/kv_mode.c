#include "run/engine.h"

#include <stdio.h>

#include <stdbool.h>
#include <string.h>

extern char **environ;

#define PREFIX "TINYLOOP_KV_"

static const char *const known_modes[] = {"TINYLOOP_KV_H_MODE", "TINYLOOP_KV_INT8",
                                          "TINYLOOP_KV_INT4"};

static bool is_known(const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof known_modes / sizeof *known_modes; i++)
        if (strlen(known_modes[i]) == length && memcmp(known_modes[i], name, length) == 0)
            return true;
    return false;
}

/* The next variable from *at on that asks for a mode ("" and "0" don't); NULL: no more. */
static const char *next_request(char ***at)
{
    for (; *at != NULL && **at != NULL; ++*at) {
        const char *variable = **at, *value = strchr(variable, '=');
        if (strncmp(variable, PREFIX, sizeof PREFIX - 1) != 0 || value == NULL)
            continue;
        if (value[1] != '\0' && strcmp(value, "=0") != 0) {
            ++*at;
            return variable;
        }
    }
    return NULL;
}

tl_status kv_mode_resolve(int32_t *mode, int32_t option)
{
    char **at = environ;
    const char *first = next_request(&at), *second = next_request(&at);
    for (const char *request = first; request != NULL; request = request == first ? second : NULL) {
        int length = (int)strcspn(request, "=");
        if (!is_known(request, (size_t)length))
            return tl_fail(TL_STATUS_INVALID,
                           "environment variable %.*s is no KV mode; there are "
                           "%s, %s and %s",
                           length, request, known_modes[0], known_modes[1], known_modes[2]);
    }
    if (second != NULL)
        return tl_fail(TL_STATUS_INVALID,
                       "environment variables %.*s and %.*s contradict each "
                       "other: set one",
                       (int)strcspn(first, "="), first, (int)strcspn(second, "="), second);
    if (first != NULL && option != TL_KV_MODE_DEFAULT)
        return tl_fail(TL_STATUS_INVALID,
                       "environment variable %.*s and kv_mode %s contradict "
                       "each other: set one",
                       (int)strcspn(first, "="), first,
                       option == TL_KV_MODE_FP16 ? "fp16" : "fp32");
    if (first != NULL)
        return tl_fail(TL_STATUS_UNSUPPORTED,
                       "environment variable %.*s asks for a KV mode that "
                       "this version does not have; unset it for fp16, or ask for kv_mode fp32",
                       (int)strcspn(first, "="), first);
    *mode = option == TL_KV_MODE_DEFAULT ? TL_KV_MODE_FP16 : option;
    return TL_STATUS_OK;
}
