/* SPDX-License-Identifier: Apache-2.0
 *
 * invariant.c - the end of a process that finds itself wrong: see invariant.h.
 */
#include "util/invariant.h"

#include <stdio.h>
#include <stdlib.h>

void hifc_assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "libhifc: %s:%d: \"%s\" does not hold; please report this. Nothing more is "
                    "written; the namespace recovers as after a crash.\n", file, line, condition);
    abort();
}
