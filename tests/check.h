/* SPDX-License-Identifier: Apache-2.0
 *
 * check.h - the few lines that a C test program needs.
 *
 *   TEST(name) { CHECK(condition); CHECK_EQ(a, b); }
 *   int main(int argc, char **argv) { return check_main(argc, argv); }
 *
 * A failed check prints place and values and ends the program. Arguments select tests by name.
 */
#ifndef HIFC_CHECK_H
#define HIFC_CHECK_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hifc.h"

/* How long a test waits for what has to happen: it bounds a hang and nothing else, so that a busy
 * machine never reaches it. No test judges how long anything took. */
#define CHECK_HANG_S 120
#define CHECK_HANG_US (CHECK_HANG_S * INT64_C(1000000))

struct check_test {
    const char *name;
    void (*run)(void);
    struct check_test *next;
};

static struct check_test *check_tests;
__attribute__((unused)) static struct check_test **check_tail = &check_tests;

#define TEST(test_name)                                                                      \
    static void test_name(void);                                                             \
    static struct check_test test_name##_entry = {#test_name, test_name, NULL};              \
    __attribute__((constructor)) static void test_name##_register(void)                      \
    {                                                                                        \
        *check_tail = &test_name##_entry;                                                    \
        check_tail = &test_name##_entry.next;                                                \
    }                                                                                        \
    static void test_name(void)

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            struct hifc_error check_error = {0};                                             \
            hifc_last_error(&check_error);                                                   \
            fprintf(stderr, "%s:%d: %s does not hold (last error: %s)\n", __FILE__,          \
                    __LINE__, #condition, check_error.message);                              \
            abort();                                                                         \
        }                                                                                    \
    } while (0)

#define CHECK_EQ(actual, expected)                                                           \
    do {                                                                                     \
        int64_t check_a = (int64_t)(actual), check_e = (int64_t)(expected);                  \
        if (check_a != check_e) {                                                            \
            struct hifc_error check_error = {0};                                             \
            hifc_last_error(&check_error);                                                   \
            fprintf(stderr, "%s:%d: %s is %" PRId64 ", expected %s = %" PRId64               \
                    " (last error: %s)\n", __FILE__, __LINE__, #actual, check_a, #expected,  \
                    check_e, check_error.message);                                           \
            abort();                                                                         \
        }                                                                                    \
    } while (0)

static inline bool last_error_says(const char *words)
{
    struct hifc_error error;
    hifc_last_error(&error);
    bool says = strstr(error.message, words) != NULL;
    if (!says) {
        fprintf(stderr, "message without '%s': %s\n", words, error.message);
    }
    return says;
}

static inline int check_main(int argc, char **argv)
{
    unsigned ran = 0;
    for (struct check_test *test = check_tests; test; test = test->next) {
        int wanted = argc < 2;
        for (int i = 1; i < argc; i++) {
            wanted |= strcmp(argv[i], test->name) == 0;
        }
        if (wanted) {
            fprintf(stderr, "%s\n", test->name);
            test->run();
            ran++;
        }
    }
    printf("%u passed, 0 failed\n", ran);
    return ran == 0;
}

#endif
