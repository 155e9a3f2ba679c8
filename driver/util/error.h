/* SPDX-License-Identifier: Apache-2.0
 *
 * error.h - the calling thread's last error, what hifc_last_error() hands out.
 *
 * Internal functions return 0 or a negative errno and have set the error, with the fix in its
 * message, by the time they return; callers pass the code on.
 */
#ifndef HIFC_ERROR_H
#define HIFC_ERROR_H

#include <errno.h>
#include <stdint.h>

#include "hifc.h"

/* Records the error and returns code (negative). What to do about it stands behind the last "; " of
 * the format (not of what is printed: an argument may hold anything). */
int hifc_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same for a command that the device failed: code, the NVMe status and the place. */
int hifc_fail_command(int code, uint8_t sct, uint8_t sc, uint8_t opcode, uint64_t lba,
                      uint32_t nlb, uint32_t lba_bytes, const char *device_uri);
/* Fills an error without touching the thread's own. */
void hifc_error_fill(struct hifc_error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void hifc_error_fill_command(struct hifc_error *error, int code, uint8_t sct, uint8_t sc,
                             uint8_t opcode, uint64_t lba, uint32_t nlb, uint32_t lba_bytes,
                             const char *device_uri);
/* The words of the NVMe specification for a status, e.g. "Unrecovered Read Error". */
const char *hifc_nvme_status_text(uint8_t sct, uint8_t sc);
/* What pthread_create and eventfd returned (a positive errno), and for what: a limit of the system is
 * named with what raises it, never passed on as EAGAIN, which would read as "try again". */
int hifc_fail_thread(int error, const char *what);
int hifc_fail_eventfd(int error, const char *what);
/* Adds who owns the device to the thread's last error. */
void hifc_error_holders(const int32_t *pids, uint32_t count);
void hifc_error_copy(struct hifc_error *out);        /* the thread's last error */
void hifc_error_adopt(const struct hifc_error *from); /* makes it the thread's last error */

/* True in a child of fork(): nothing of the library may be used there. */
_Bool hifc_forked_since(uint64_t generation);
uint64_t hifc_fork_generation(void);

#endif
