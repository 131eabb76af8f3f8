/* Checks of tl_generate_options, each naming parameter, value and range. */
#ifndef TL_GENERATE_OPTIONS_H
#define TL_GENERATE_OPTIONS_H

#include "run/engine.h"

tl_status generate_options_check(const tl_generate_options *options, const tl_model *model);

#endif
