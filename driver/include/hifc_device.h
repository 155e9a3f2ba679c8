/* SPDX-License-Identifier: Apache-2.0
 *
 * hifc_device.h - the public interface to a device as a whole, whatever stands on it: what it says of
 * itself, and erasing it. Part of hifc.h, whose rules of return values and threads hold here.
 *
 * Each call opens the device, which takes its lock, and closes it again.
 */
#ifndef HIFC_DEVICE_INFO_H
#define HIFC_DEVICE_INFO_H

#include <stdint.h>

enum hifc_info_flag {
    HIFC_INFO_NVME = 0x1,          /* nsid and all below it are from Identify */
    HIFC_INFO_DEALLOCATE = 0x2,    /* understands deallocate */
    HIFC_INFO_WRITE_CACHE = 0x4,   /* volatile */
    HIFC_INFO_HEALTH = 0x8,        /* health holds the log page, else health_problem says why not */
    HIFC_INFO_UNREADABLE = 0x10,   /* signature is not known: it could not be read */
    HIFC_INFO_WHOLE = 0x20,        /* the device is the whole NVMe namespace, no part of it */
    HIFC_INFO_SHARED = 0x40,       /* other controllers may reach the namespace (NMIC) */
    HIFC_INFO_FORMAT = 0x80,       /* Format NVM (OACS) */
    HIFC_INFO_FORMAT_ALL = 0x100,  /* it, or its secure erase, reaches all namespaces (FNA) */
    HIFC_INFO_CRYPTO_ERASE = 0x200, /* as part of Format NVM (FNA) */
    HIFC_INFO_RESERVED = 0x400,     /* a host holds a reservation, or has registered for one */
    HIFC_INFO_RESERVED_UNKNOWN = 0x800, /* it has reservations, and would not report them */
    HIFC_INFO_SANITIZE_BLOCK = 0x1000,  /* NVMe Sanitize with block erase (SANICAP) */
    HIFC_INFO_SANITIZE_CRYPTO = 0x2000  /* with cryptographic erase (SANICAP) */
};

enum hifc_sanitize_state {
    HIFC_SANITIZE_NONE = 0,    /* never sanitized, or it cannot be */
    HIFC_SANITIZE_DONE = 1,    /* the last one succeeded */
    HIFC_SANITIZE_RUNNING = 2, /* reads and writes fail until it has ended */
    HIFC_SANITIZE_FAILED = 3,  /* reads and writes fail until another one succeeds */
    HIFC_SANITIZE_UNKNOWN = 4  /* the drive would not say */
};

/* What the Sanitize Status log page tells. A sanitize is the whole drive's, goes on after the command
 * that started it and after a reset, and is resumed after a loss of power. */
struct hifc_sanitize_status {
    uint32_t state;      /* enum hifc_sanitize_state */
    uint32_t action;     /* of the last one: 2 block erase, 3 overwrite, 4 cryptographic erase */
    uint32_t progress;   /* of 65536, while it runs */
    uint32_t restricted; /* 1: if the last one failed, nothing but another one opens the drive again */
    uint32_t estimate_s; /* what the whole of it takes; UINT32_MAX: the drive does not say */
};

struct hifc_device_info {
    uint64_t size_bytes;
    uint32_t lba_bytes;
    uint32_t flags;      /* enum hifc_info_flag */
    uint32_t nsid;       /* 0: no NVMe namespace */
    uint32_t namespaces; /* of the whole drive, those that this controller cannot see included */
    uint8_t eui64[8];    /* zero: none */
    uint8_t nguid[16];
    char model[48], serial[24], firmware[16];
    char signature[96]; /* what stands on it, a HiFC namespace included; "" if nothing is known */
    char health_problem[240];
    uint8_t health[512]; /* SMART / health log page */
    struct hifc_sanitize_status sanitize;
};

/* What the device says of itself, whatever is on it. Changes nothing. -EBUSY: a process owns it. */
HIFC_API int hifc_device_info(const char *uri, struct hifc_device_info *out);

enum hifc_erase_method {
    HIFC_ERASE_DEALLOCATE = 1, /* the drive is told that nothing is needed; cells may keep it */
    HIFC_ERASE_OVERWRITE = 2,  /* zeros everywhere; spare cells may keep it */
    HIFC_ERASE_FORMAT = 3,     /* Format NVM with user data erase */
    HIFC_ERASE_CRYPTO = 4      /* Format NVM with cryptographic erase */
};

/* Takes everything off the device, whatever it is: nobody is asked here. Afterwards no signature can
 * be read at its ends, where deallocate and overwrite put zeros first. Format NVM is refused (-EPERM)
 * where it would reach beyond the one namespace, or another host has it reserved. */
HIFC_API int hifc_erase(const char *uri, uint32_t method);

/* Told how far a sanitize is, about once a second; anything but 0 ends the waiting. */
typedef int (*hifc_sanitize_watch)(const struct hifc_sanitize_status *status, void *argument);

/* Sanitizes the drive, with block erase or, where it has only that, cryptographic erase; waits for a
 * sanitize that runs already instead of starting one. Refused (-EPERM) where it would reach beyond
 * this namespace, since it is the whole drive's. -ECANCELED: watch, which may be NULL, ended the
 * waiting; -ETIMEDOUT: it takes longer than is waited. The drive goes on in both cases. */
HIFC_API int hifc_sanitize(const char *uri, hifc_sanitize_watch watch, void *argument);

#endif
