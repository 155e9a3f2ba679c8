/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_log.c - where the messages of SPDK and DPDK go: not to stdout, which may carry JSON, and not
 * to stderr either, but into the text of our own errors.
 *
 * SPDK tells on the thread whose call fails what went wrong there, so each thread keeps its own.
 */
#define _GNU_SOURCE /* fopencookie */
#include <stdio.h>
#include <string.h>

#include <spdk/log.h>

#include "device/spdk.h"
#include "util/error.h"

/* Of DPDK's rte_log.h, which an SPDK without DPDK's headers beside it does not bring along. */
int rte_openlog_stream(FILE *stream);

#define LOG_TEXT_MAX 240u

static _Thread_local char log_text[LOG_TEXT_MAX];

/* Lines become one, joined by "; ", without the repetition that SPDK is fond of. */
static void keep(const char *line, size_t length)
{
    while (length && (line[length - 1] == '\n' || line[length - 1] == ' ')) {
        length--;
    }
    char copy[LOG_TEXT_MAX];
    snprintf(copy, sizeof(copy), "%.*s", (int)length, line);
    if (copy[0] && !strstr(log_text, copy)) {
        strncat(log_text, log_text[0] ? "; " : "", sizeof(log_text) - strlen(log_text) - 1);
        strncat(log_text, copy, sizeof(log_text) - strlen(log_text) - 1);
    }
}

static void on_spdk_message(int level, const char *file, const int line, const char *function,
                            const char *format, va_list arguments)
{
    (void)file;
    (void)line;
    (void)function;
    if (level > SPDK_LOG_WARN) {
        return;
    }
    char text[LOG_TEXT_MAX];
    vsnprintf(text, sizeof(text), format, arguments);
    keep(text, strlen(text));
}

static ssize_t on_dpdk_output(void *cookie, const char *text, size_t size)
{
    (void)cookie;
    /* Besides errors, "EAL:" lines that tell the CPUs and the parameters: of no use to anybody. */
    if (memmem(text, size, "EAL: ", 5) && !memmem(text, size, "Detected", 8) &&
        !memmem(text, size, "Probing", 7) && !memmem(text, size, "No free hugepages", 17)) {
        keep(text, size);
    }
    return (ssize_t)size;
}

int hifc_spdk_log_start(FILE **out)
{
    static FILE *stream;
    if (!stream) {
        cookie_io_functions_t functions = {.write = on_dpdk_output};
        stream = fopencookie(NULL, "w", functions);
        if (!stream) {
            return hifc_fail(-ENOMEM, "spdk: out of memory for a log stream");
        }
        setvbuf(stream, NULL, _IOLBF, 1024);
        rte_openlog_stream(stream);
        spdk_log_open(on_spdk_message);
    }
    *out = stream;
    return 0;
}

void hifc_spdk_log_clear(void)
{
    log_text[0] = '\0';
}

const char *hifc_spdk_log_text(void)
{
    return log_text;
}
