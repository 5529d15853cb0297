// The text of this thread's last failure.
#pragma once

#include "sage_cuda.h"

namespace sage {

void clear_error();
sage_status fail(sage_status status, const char * format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace sage
