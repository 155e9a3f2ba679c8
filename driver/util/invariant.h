/* SPDX-License-Identifier: Apache-2.0
 *
 * invariant.h - what must hold, as code. It stays on in releases: a store that finds itself wrong stops
 * before it writes, and recovery then sees what an end by kill -9 leaves. Any thread.
 */
#ifndef HIFC_INVARIANT_H
#define HIFC_INVARIANT_H

/* Ends the process with the condition and its place on stderr if the condition does not hold. */
#define hifc_assert(condition) \
    (__builtin_expect(!(condition), 0) ? hifc_assert_failed(#condition, __FILE__, __LINE__) : (void)0)
/* Takes amount off an unsigned counter that holds at least that much. */
#define hifc_count_down(counter, amount) \
    do { \
        hifc_assert((counter) >= (amount)); \
        (counter) -= (amount); \
    } while (0)

_Noreturn void hifc_assert_failed(const char *condition, const char *file, int line);

#endif
