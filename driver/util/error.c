/* SPDX-License-Identifier: Apache-2.0
 *
 * error.c - the calling thread's last error, the words for an NVMe status, and the fork generation.
 *
 * Everything here is callable from any thread at any time and takes no lock: the error is
 * thread-local, the generation is one number that only the child handler of fork() changes.
 */
#define _GNU_SOURCE /* strerror_r that returns the text */
#include "util/error.h"

#include <assert.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static _Thread_local struct hifc_error last_error;

/* ---- NVMe status ----------------------------------------------------------------------------- */

enum { SCT_GENERIC = 0, SCT_COMMAND = 1, SCT_MEDIA = 2, SCT_PATH = 3, SCT_VENDOR = 7 };

struct status_text {
    uint8_t sct;
    uint8_t sc;
    const char *text;
};

/* NVM Express Base 2.0, figures 93 to 97, and the NVM command set's own: what a host that reads,
 * writes, flushes, deallocates and talks over fabrics can meet. */
static const struct status_text status_texts[] = {
    {SCT_GENERIC, 0x00, "Successful Completion"},
    {SCT_GENERIC, 0x01, "Invalid Command Opcode"},
    {SCT_GENERIC, 0x02, "Invalid Field in Command"},
    {SCT_GENERIC, 0x03, "Command ID Conflict"},
    {SCT_GENERIC, 0x04, "Data Transfer Error"},
    {SCT_GENERIC, 0x05, "Commands Aborted due to Power Loss Notification"},
    {SCT_GENERIC, 0x06, "Internal Error"},
    {SCT_GENERIC, 0x07, "Command Abort Requested"},
    {SCT_GENERIC, 0x08, "Command Aborted due to SQ Deletion"},
    {SCT_GENERIC, 0x09, "Command Aborted due to Failed Fused Command"},
    {SCT_GENERIC, 0x0a, "Command Aborted due to Missing Fused Command"},
    {SCT_GENERIC, 0x0b, "Invalid Namespace or Format"},
    {SCT_GENERIC, 0x0c, "Command Sequence Error"},
    {SCT_GENERIC, 0x0d, "Invalid SGL Segment Descriptor"},
    {SCT_GENERIC, 0x0e, "Invalid Number of SGL Descriptors"},
    {SCT_GENERIC, 0x0f, "Data SGL Length Invalid"},
    {SCT_GENERIC, 0x10, "Metadata SGL Length Invalid"},
    {SCT_GENERIC, 0x11, "SGL Descriptor Type Invalid"},
    {SCT_GENERIC, 0x12, "Invalid Use of Controller Memory Buffer"},
    {SCT_GENERIC, 0x13, "PRP Offset Invalid"},
    {SCT_GENERIC, 0x14, "Atomic Write Unit Exceeded"},
    {SCT_GENERIC, 0x15, "Operation Denied"},
    {SCT_GENERIC, 0x16, "SGL Offset Invalid"},
    {SCT_GENERIC, 0x18, "Host Identifier Inconsistent Format"},
    {SCT_GENERIC, 0x19, "Keep Alive Timer Expired"},
    {SCT_GENERIC, 0x1a, "Keep Alive Timeout Invalid"},
    {SCT_GENERIC, 0x1b, "Command Aborted due to Preempt and Abort"},
    {SCT_GENERIC, 0x1c, "Sanitize Failed"},
    {SCT_GENERIC, 0x1d, "Sanitize In Progress"},
    {SCT_GENERIC, 0x1e, "SGL Data Block Granularity Invalid"},
    {SCT_GENERIC, 0x1f, "Command Not Supported for Queue in CMB"},
    {SCT_GENERIC, 0x20, "Namespace is Write Protected"},
    {SCT_GENERIC, 0x21, "Command Interrupted"},
    {SCT_GENERIC, 0x22, "Transient Transport Error"},
    {SCT_GENERIC, 0x23, "Command Prohibited by Command and Feature Lockdown"},
    {SCT_GENERIC, 0x24, "Admin Command Media Not Ready"},
    {SCT_GENERIC, 0x29, "FDP Disabled"},
    {SCT_GENERIC, 0x2a, "Invalid Placement Handle List"},
    {SCT_GENERIC, 0x80, "LBA Out of Range"},
    {SCT_GENERIC, 0x81, "Capacity Exceeded"},
    {SCT_GENERIC, 0x82, "Namespace Not Ready"},
    {SCT_GENERIC, 0x83, "Reservation Conflict"},
    {SCT_GENERIC, 0x84, "Format In Progress"},
    {SCT_COMMAND, 0x00, "Completion Queue Invalid"},
    {SCT_COMMAND, 0x01, "Invalid Queue Identifier"},
    {SCT_COMMAND, 0x02, "Invalid Queue Size"},
    {SCT_COMMAND, 0x03, "Abort Command Limit Exceeded"},
    {SCT_COMMAND, 0x05, "Asynchronous Event Request Limit Exceeded"},
    {SCT_COMMAND, 0x06, "Invalid Firmware Slot"},
    {SCT_COMMAND, 0x07, "Invalid Firmware Image"},
    {SCT_COMMAND, 0x08, "Invalid Interrupt Vector"},
    {SCT_COMMAND, 0x09, "Invalid Log Page"},
    {SCT_COMMAND, 0x0a, "Invalid Format"},
    {SCT_COMMAND, 0x0b, "Firmware Activation Requires Conventional Reset"},
    {SCT_COMMAND, 0x0c, "Invalid Queue Deletion"},
    {SCT_COMMAND, 0x0d, "Feature Identifier Not Saveable"},
    {SCT_COMMAND, 0x0e, "Feature Not Changeable"},
    {SCT_COMMAND, 0x0f, "Feature Not Namespace Specific"},
    {SCT_COMMAND, 0x15, "Namespace Insufficient Capacity"},
    {SCT_COMMAND, 0x16, "Namespace Identifier Unavailable"},
    {SCT_COMMAND, 0x18, "Namespace Already Attached"},
    {SCT_COMMAND, 0x19, "Namespace Is Private"},
    {SCT_COMMAND, 0x1a, "Namespace Not Attached"},
    {SCT_COMMAND, 0x1b, "Thin Provisioning Not Supported"},
    {SCT_COMMAND, 0x1c, "Controller List Invalid"},
    {SCT_COMMAND, 0x1d, "Device Self-test In Progress"},
    {SCT_COMMAND, 0x1f, "Invalid Controller Identifier"},
    {SCT_COMMAND, 0x21, "Invalid Number of Controller Resources"},
    {SCT_COMMAND, 0x22, "Invalid Resource Identifier"},
    {SCT_COMMAND, 0x24, "ANA Group Identifier Invalid"},
    {SCT_COMMAND, 0x25, "ANA Attach Failed"},
    {SCT_COMMAND, 0x28, "I/O Command Set Not Supported"},
    {SCT_COMMAND, 0x80, "Conflicting Attributes"},
    {SCT_COMMAND, 0x81, "Invalid Protection Information"},
    {SCT_COMMAND, 0x82, "Attempted Write to Read Only Range"},
    {SCT_COMMAND, 0x83, "Command Size Limit Exceeded"},
    {SCT_COMMAND, 0x84, "Connect Invalid Host"},
    {SCT_COMMAND, 0x90, "Discovery Restart"},
    {SCT_COMMAND, 0x91, "Authentication Required"},
    {SCT_COMMAND, 0xb8, "Zone Boundary Error"},
    {SCT_COMMAND, 0xb9, "Zone Is Full"},
    {SCT_COMMAND, 0xba, "Zone Is Read Only"},
    {SCT_COMMAND, 0xbb, "Zone Is Offline"},
    {SCT_COMMAND, 0xbc, "Zone Invalid Write"},
    {SCT_COMMAND, 0xbd, "Too Many Active Zones"},
    {SCT_COMMAND, 0xbe, "Too Many Open Zones"},
    {SCT_COMMAND, 0xbf, "Invalid Zone State Transition"},
    {SCT_MEDIA, 0x80, "Write Fault"},
    {SCT_MEDIA, 0x81, "Unrecovered Read Error"},
    {SCT_MEDIA, 0x82, "End-to-end Guard Check Error"},
    {SCT_MEDIA, 0x83, "End-to-end Application Tag Check Error"},
    {SCT_MEDIA, 0x84, "End-to-end Reference Tag Check Error"},
    {SCT_MEDIA, 0x85, "Compare Failure"},
    {SCT_MEDIA, 0x86, "Access Denied"},
    {SCT_MEDIA, 0x87, "Deallocated or Unwritten Logical Block"},
    {SCT_MEDIA, 0x88, "End-to-end Storage Tag Check Error"},
    {SCT_PATH, 0x00, "Internal Path Error"},
    {SCT_PATH, 0x01, "Asymmetric Access Persistent Loss"},
    {SCT_PATH, 0x02, "Asymmetric Access Inaccessible"},
    {SCT_PATH, 0x03, "Asymmetric Access Transition"},
    {SCT_PATH, 0x60, "Controller Pathing Error"},
    {SCT_PATH, 0x70, "Host Pathing Error"},
    {SCT_PATH, 0x71, "Command Aborted By Host"},
};

const char *hifc_nvme_status_text(uint8_t sct, uint8_t sc)
{
    for (size_t i = 0; i < sizeof(status_texts) / sizeof(status_texts[0]); i++) {
        if (status_texts[i].sct == sct && status_texts[i].sc == sc) {
            return status_texts[i].text;
        }
    }
    if (sct == SCT_VENDOR || sc >= 0xc0) {
        return "Vendor Specific Status";
    }
    switch (sct) {
    case SCT_GENERIC:
        return "Unknown Generic Command Status";
    case SCT_COMMAND:
        return "Unknown Command Specific Status";
    case SCT_MEDIA:
        return "Unknown Media and Data Integrity Error";
    case SCT_PATH:
        return "Unknown Path Related Status";
    default:
        return "Reserved Status Code Type";
    }
}

static const char *opcode_text(uint8_t opcode)
{
    switch (opcode) {
    case 0x00:
        return "flush";
    case 0x01:
        return "write";
    case 0x02:
        return "read";
    case 0x08:
        return "write zeroes";
    case 0x09:
        return "deallocate";
    default:
        return "command";
    }
}

/* What whoever operates the device can do about it. */
static const char *advice(int code, uint8_t sct, uint8_t sc)
{
    if (code == -ETIMEDOUT) {
        return "the device answers too slowly: look at its health log, or raise command_timeout_ms";
    }
    if (code == -ENOSPC || (sct == SCT_GENERIC && sc == 0x81)) {
        return "the medium below is full: free space there, or lay out a smaller device";
    }
    if (code == -EROFS || (sct == SCT_GENERIC && sc == 0x20) ||
        (sct == SCT_COMMAND && sc == 0x82)) {
        return "it was opened read-only or is write protected: open it for writing";
    }
    if (sct == SCT_GENERIC && (sc == 0x1c || sc == 0x1d)) {
        return sc == 0x1c ? "nothing can be read or written until another sanitize succeeds: "
                            "hifc-admin erase --method sanitize"
                          : "nothing can be read or written until it has ended: hifc-admin erase "
                            "--method sanitize waits for it";
    }
    if (sct == SCT_MEDIA) {
        return sc == 0x81 ? "these blocks are lost; if there are more, replace the device"
                          : "look at the device's health log and consider replacing it";
    }
    if (code == -ENODEV || sct == SCT_PATH ||
        (sct == SCT_GENERIC && (sc == 0x08 || sc == 0x22))) {
        return "the controller or the way to it is gone, or the drive was unplugged: close it, check "
               "cabling, target and kernel log, then open it again";
    }
    if (sct == SCT_GENERIC && sc == 0x80) {
        return "the device is smaller than it was: check that it is the right one";
    }
    return "look at the device's health log and the kernel log";
}

/* ---- filling and fetching -------------------------------------------------------------------- */

void hifc_error_fill_command(struct hifc_error *error, int code, uint8_t sct, uint8_t sc,
                             uint8_t opcode, uint64_t lba, uint32_t nlb, uint32_t lba_bytes,
                             const char *device_uri)
{
    char cause[160], place[80] = "";
    char buffer[80];
    memset(error, 0, sizeof(*error));
    error->code = code;
    error->sct = sct;
    error->sc = sc;
    error->opcode = opcode;
    error->lba = lba;
    error->nlb = nlb;
    error->lba_bytes = lba_bytes;
    if (opcode != 0x00 && nlb != 0) {
        snprintf(place, sizeof(place), " of %u blocks of %u bytes at LBA %llu", nlb, lba_bytes,
                 (unsigned long long)lba);
    }
    if (sct || sc) {
        snprintf(cause, sizeof(cause), "%s (status code type %#x, status code %#x)",
                 hifc_nvme_status_text(sct, sc), sct, sc);
    } else {
        snprintf(cause, sizeof(cause), "%s", strerror_r(-code, buffer, sizeof(buffer)));
    }
    int used = snprintf(error->message, sizeof(error->message), "%.120s: %s%s failed: %s; ",
                        device_uri ? device_uri : "device", opcode_text(opcode), place, cause);
    error->fix_at = (uint32_t)used;
    assert(error->fix_at < sizeof(error->message));
    snprintf(error->message + used, sizeof(error->message) - (size_t)used, "%s",
             advice(code, sct, sc));
}

int hifc_fail_command(int code, uint8_t sct, uint8_t sc, uint8_t opcode, uint64_t lba,
                      uint32_t nlb, uint32_t lba_bytes, const char *device_uri)
{
    hifc_error_fill_command(&last_error, code, sct, sc, opcode, lba, nlb, lba_bytes, device_uri);
    return code;
}

/* How many bytes a message has before what to do begins, 0 where format says nothing of it. */
static uint32_t fix_at(const char *format, size_t message_bytes, va_list arguments)
{
    char before[sizeof(last_error.message)];
    const char *semicolon = NULL;
    for (const char *next = format; (next = strstr(next, "; ")); next++) {
        semicolon = next;
    }
    if (!semicolon || (size_t)(semicolon - format) >= sizeof(before)) {
        return 0;
    }
    snprintf(before, sizeof(before), "%.*s", (int)(semicolon - format), format);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral" /* a start of what hifc_fail had checked */
    int used = vsnprintf(NULL, 0, before, arguments);
#pragma GCC diagnostic pop
    bool fits = used >= 0 && (size_t)used + 2 < message_bytes;
    return fits ? (uint32_t)used + 2 : 0;
}

/* An argument may point into an error that will be replaced by the one that is returned. */
static struct hifc_error error_build(int code, const char *format, va_list arguments)
{
    struct hifc_error error = {.code = code};
    va_list again;
    va_copy(again, arguments);
    vsnprintf(error.message, sizeof(error.message), format, arguments);
    error.fix_at = fix_at(format, strlen(error.message), again);
    va_end(again);
    return error;
}

int hifc_fail(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    last_error = error_build(code, format, arguments);
    va_end(arguments);
    return code;
}

void hifc_error_fill(struct hifc_error *error, int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    *error = error_build(code, format, arguments);
    va_end(arguments);
}

void hifc_error_holders(const int32_t *pids, uint32_t count)
{
    last_error.holder_count = count < HIFC_ERROR_HOLDERS_MAX ? count : HIFC_ERROR_HOLDERS_MAX;
    memcpy(last_error.holders, pids, last_error.holder_count * sizeof(*pids));
}

int hifc_fail_thread(int error, const char *what)
{
    if (error == EAGAIN) {
        return hifc_fail(-EUSERS, "%s: no thread can be started, for the limit of threads is reached; "
                                  "raise it (ulimit -u, in a container its limit of pids, sysctl "
                                  "kernel.threads-max)", what);
    }
    return hifc_fail(-error, "%s: no thread can be started: %s", what, strerror(error));
}

int hifc_fail_eventfd(int error, const char *what)
{
    if (error == EPERM || error == EACCES || error == ENOSYS) {
        return hifc_fail(-EPERM, "%s: eventfd is not permitted; allow the system call eventfd2 (in a "
                                 "container, by its seccomp profile)", what);
    }
    return hifc_fail(-error, "%s: no eventfd: %s; raise the limit of open files (ulimit -n)", what,
                     strerror(error));
}

void hifc_error_copy(struct hifc_error *out)
{
    *out = last_error;
}

void hifc_error_adopt(const struct hifc_error *from)
{
    if (from != &last_error) {
        last_error = *from;
    }
}

int hifc_last_error(struct hifc_error *out)
{
    if (out) {
        *out = last_error;
    }
    return last_error.code;
}

/* ---- fork ------------------------------------------------------------------------------------ */

static _Atomic uint64_t fork_generation = 1;

static void count_fork(void)
{
    atomic_fetch_add_explicit(&fork_generation, 1, memory_order_relaxed);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

_Bool hifc_forked_since(uint64_t generation)
{
    return hifc_fork_generation() != generation;
}

uint64_t hifc_fork_generation(void)
{
    return atomic_load_explicit(&fork_generation, memory_order_relaxed);
}
