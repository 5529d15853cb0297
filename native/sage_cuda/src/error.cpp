#include "error.h"

#include <cstdarg>
#include <cstdio>

static thread_local char text[512];

void sage::clear_error() { text[0] = 0; }

sage_status sage::fail(sage_status status, const char * format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return status;
}

extern "C" const char * sage_last_error(void) { return text; }
