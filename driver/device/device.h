/* SPDX-License-Identifier: Apache-2.0
 *
 * device.h - the narrow table of functions behind which every device stands.
 *
 * A device has a geometry and opens queue pairs; one thread at a time drives a queue pair, and two
 * queue pairs of a device may be driven by two threads. An I/O is one command: a contiguous range
 * of logical blocks and a scatter list. The engine above never exceeds max_transfer_bytes, max_iov
 * and the depth of the queue pair; the device returns every accepted I/O exactly once, through
 * io->done, from within poll or qpair_close and never from within submit.
 */
#ifndef HIFC_DEVICE_H
#define HIFC_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define HIFC_IO_IOV_MAX 34u
#define HIFC_URI_PARAMS_MAX 16u

/* ---- uri ------------------------------------------------------------------------------------ */

/* scheme://target?name=value&... ; strings point into text. */
struct hifc_uri {
    char text[1024];
    const char *scheme;
    const char *target; /* what stands between "//" and "?", without the leading slash eaten */
    uint32_t param_count;
    struct {
        const char *name;
        const char *value;
    } params[HIFC_URI_PARAMS_MAX];
};

int hifc_uri_parse(const char *text, struct hifc_uri *out);
/* NULL when absent. */
const char *hifc_uri_param(const struct hifc_uri *uri, const char *name);
/* "8GiB", "512MiB", "4096" ...; *value is left alone when the parameter is absent. */
int hifc_uri_size(const struct hifc_uri *uri, const char *name, uint64_t *value);
int hifc_uri_u64(const struct hifc_uri *uri, const char *name, uint64_t *value);
/* -EINVAL, naming the parameter and the allowed ones, if any is not in the NULL-terminated list. */
int hifc_uri_allow(const struct hifc_uri *uri, const char *const *names);
/* Writes the URI out again under another scheme, less the parameters that begin with without. */
int hifc_uri_render(const struct hifc_uri *uri, const char *scheme, const char *without,
                    char *out, size_t size);

/* ---- one command ---------------------------------------------------------------------------- */

/* Allocate: whatever of the range has no room on the medium yet gets it, so that a write there does
 * not fail for want of it. -ENOSPC: there is none left. -ENOTSUP: only writing makes sure of it. */
enum hifc_io_op {
    HIFC_IO_READ,
    HIFC_IO_WRITE,
    HIFC_IO_FLUSH,
    HIFC_IO_DEALLOCATE,
    HIFC_IO_ALLOCATE
};

struct hifc_io {
    struct hifc_io *next;               /* the engine's */
    void (*done)(struct hifc_io *io);   /* the engine's */
    void *owner;                        /* the engine's */
    uint64_t offset_bytes;              /* multiple of lba_bytes */
    uint32_t length_bytes;              /* multiple of lba_bytes; (de)allocate: of any size */
    uint8_t op;                         /* enum hifc_io_op */
    uint8_t sct, sc;                    /* out: NVMe status, generic success is 0, 0 */
    uint8_t reserved;
    int32_t error;                      /* out: 0 or negative errno */
    uint32_t iov_count;
    uint64_t device_private[4];
    struct iovec iov[HIFC_IO_IOV_MAX];
};

/* ---- a device ------------------------------------------------------------------------------- */

struct hifc_geometry {
    uint64_t size_bytes;
    uint32_t lba_bytes;
    uint32_t max_transfer_bytes;   /* of one command, at least one page */
    uint32_t max_iov;              /* scatter elements of one command, 1..HIFC_IO_IOV_MAX */
    uint32_t buffer_align_bytes;   /* of every element's address and length */
    uint32_t boundary_bytes;       /* 0 or a power of two: a command across it becomes two */
    bool volatile_write_cache;     /* flush has work to do */
    bool deallocate;               /* understands deallocate */
    bool thin;                     /* room comes with the first write, which may find none: allocate
                                      before */
    bool direct;                   /* no page cache in between */
    bool registered_only;          /* memory must have been registered */
    bool one_element;              /* a command of several elements becomes several commands: better
                                      to cut between elements than within */
    uint32_t nsid;                 /* of an NVMe namespace, else 0 */
    char model[41], serial[21], firmware[9];
};

/* An NVMe command that tells of a drive or erases it, sent as it is. */
struct hifc_nvme_passthru {
    uint8_t opcode;
    uint8_t sct, sc; /* out */
    bool io_queue;   /* no admin command: Reservation Report is one of the NVM command set */
    uint32_t nsid;
    uint32_t cdw10, cdw11;
    uint32_t timeout_ms;
    uint32_t data_bytes; /* of what the controller returns; 0 or a page at most */
    void *data;
};

struct hifc_qpair;

struct hifc_device {
    const struct hifc_device_ops *ops;
    struct hifc_geometry geometry;
    uint64_t fork_generation; /* of the process that opened it; a child must not touch it */
    char uri[1024];
};

/* CREATE: a missing file is created (format). Unless hifc_device_keep is called, it is gone again
 * when the device is closed. */
enum { HIFC_DEVICE_READ_ONLY = 1, HIFC_DEVICE_CREATE = 2 };

struct hifc_device_ops {
    const char *scheme;
    int (*open)(const struct hifc_uri *uri, unsigned flags, struct hifc_device **out);
    void (*close)(struct hifc_device *device);
    int (*keep)(struct hifc_device *device); /* NULL: creates nothing */
    /* NULL where any aligned memory will do. base and size are multiples of 2 MiB. */
    int (*register_memory)(struct hifc_device *device, void *base, uint64_t size_bytes);
    int (*unregister_memory)(struct hifc_device *device, void *base, uint64_t size_bytes);
    int (*qpair_open)(struct hifc_device *device, uint32_t depth, uint32_t command_timeout_ms,
                      struct hifc_qpair **out);
    /* Everything still in flight completes (-ECANCELED at the latest) before it returns. */
    void (*qpair_close)(struct hifc_qpair *qpair);
    /* Takes as many of ios[0..count) as fit, in order; returns that count, 0 if full. What cannot
     * be taken for another reason is taken and completes with its error. */
    uint32_t (*submit)(struct hifc_qpair *qpair, struct hifc_io *const *ios, uint32_t count);
    /* Completes what is ready; returns that count or a negative errno when the queue pair is lost
     * (all in flight has then been completed with an error). */
    int (*poll)(struct hifc_qpair *qpair);
    /* A descriptor readable when poll has work, or -1: then the caller must poll. */
    int (*event_fd)(struct hifc_qpair *qpair);
    int (*health)(struct hifc_device *device, uint8_t log[512]); /* NULL: has none */
    /* Waits for it: 0, -EIO where the controller refused it. NULL: no NVMe device. */
    int (*passthru)(struct hifc_device *device, struct hifc_nvme_passthru *command);
};

struct hifc_qpair {
    struct hifc_device *device;
};

/* Opens the device that uri names, through the table below. Takes the device's lock: -EBUSY names
 * the holder. */
int hifc_device_open(const char *uri, unsigned flags, struct hifc_device **out);
/* What open created stays, durably, under its name. */
int hifc_device_keep(struct hifc_device *device);
/* Does nothing in a child of the process that opened it. */
void hifc_device_close(struct hifc_device *device);
int hifc_device_health(struct hifc_device *device, uint8_t log[512]);

extern const struct hifc_device_ops hifc_device_ram;
extern const struct hifc_device_ops hifc_device_file;
#ifdef HIFC_WITH_SPDK
extern const struct hifc_device_ops hifc_device_spdk_pcie; /* spdk://BDF?ns=1 */
extern const struct hifc_device_ops hifc_device_spdk_tcp;  /* spdk+tcp://ADDR:PORT/NQN?ns=1 */
extern const struct hifc_device_ops hifc_device_spdk_rdma;
#endif

#endif
