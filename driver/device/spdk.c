/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk.c - the NVMe device: a PCIe drive through vfio, or a namespace of a target over TCP or RDMA.
 *
 * Opening takes the lock, connects (spdk_controller.c) and learns the geometry. The same code
 * serves every transport, so that what runs over TCP on loopback is what runs on a drive: memory
 * must be registered and aligned to pages of 4 KiB also where TCP would not mind. Any thread.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/spdk.h"
#include "util/error.h"

#define PAGE_BYTES 4096u
#define MAX_TRANSFER_BYTES (1u << 20)

/* A field of Identify Controller: ASCII, padded with spaces. */
static void copy_text(char *out, const int8_t *field, size_t size)
{
    memcpy(out, field, size);
    out[size] = '\0';
    while (size && (out[size - 1] == ' ' || out[size - 1] == '\0')) {
        out[--size] = '\0';
    }
}

static int learn_geometry(struct hifc_spdk_device *device)
{
    struct hifc_geometry *geometry = &device->base.geometry;
    const struct hifc_spdk_target *target = &device->target;
    struct spdk_nvme_ns *ns = spdk_nvme_ctrlr_get_ns(device->ctrlr, target->nsid);
    if (!ns || !spdk_nvme_ns_is_active(ns)) {
        return hifc_fail(-ENOENT, "%s: it has no namespace %u (of %u); check ns=", target->where,
                         target->nsid, spdk_nvme_ctrlr_get_num_ns(device->ctrlr));
    }
    const struct spdk_nvme_ctrlr_data *identify = spdk_nvme_ctrlr_get_data(device->ctrlr);
    uint32_t lba_bytes = spdk_nvme_ns_get_sector_size(ns);
    if ((lba_bytes != 512 && lba_bytes != 4096) || spdk_nvme_ns_get_md_size(ns) != 0) {
        return hifc_fail(-ENOTSUP, "%s: namespace %u has blocks of %u bytes with %u of metadata; "
                         "HiFC wants 512 or 4096 and none: format it so (nvme format --lbaf=)",
                         target->where, target->nsid, lba_bytes, spdk_nvme_ns_get_md_size(ns));
    }
    uint32_t max_transfer = spdk_nvme_ns_get_max_io_xfer_size(ns);
    max_transfer = max_transfer < MAX_TRANSFER_BYTES ? max_transfer : MAX_TRANSFER_BYTES;
    max_transfer &= ~(PAGE_BYTES - 1);
    if (!max_transfer) {
        return hifc_fail(-ENOTSUP, "%s: it takes less than 4 KiB in one command", target->where);
    }
    geometry->size_bytes = spdk_nvme_ns_get_num_sectors(ns) * lba_bytes;
    geometry->lba_bytes = lba_bytes;
    geometry->max_transfer_bytes = max_transfer;
    geometry->max_iov = HIFC_IO_IOV_MAX;
    geometry->one_element = !target->pcie; /* as spdk_qpair.c does it */
    geometry->buffer_align_bytes = PAGE_BYTES;
    geometry->volatile_write_cache = identify->vwc.present;
    geometry->deallocate = spdk_nvme_ns_get_flags(ns) & SPDK_NVME_NS_DEALLOCATE_SUPPORTED;
    geometry->direct = true;
    geometry->nsid = target->nsid;
    geometry->registered_only = true;
    copy_text(geometry->model, identify->mn, sizeof(geometry->model) - 1);
    copy_text(geometry->serial, identify->sn, sizeof(geometry->serial) - 1);
    copy_text(geometry->firmware, (const int8_t *)identify->fr, sizeof(geometry->firmware) - 1);
    uint32_t boundary = spdk_nvme_ns_get_optimal_io_boundary(ns) * lba_bytes;
    geometry->boundary_bytes = boundary & (boundary - 1) ? 0 : boundary;
    return 0;
}

static void spdk_close(struct hifc_device *base)
{
    struct hifc_spdk_device *device = (struct hifc_spdk_device *)base;
    if (device->ctrlr) {
        hifc_spdk_disconnect(device);
    }
    hifc_spdk_lock_drop(&device->lock);
    free(device);
}

static int spdk_open(const struct hifc_uri *uri, unsigned flags, struct hifc_device **out)
{
    struct hifc_spdk_device *device = calloc(1, sizeof(*device));
    if (!device) {
        return hifc_fail(-ENOMEM, "%s device: out of memory", uri->scheme);
    }
    device->lock.fd = -1;
    device->read_only = flags & HIFC_DEVICE_READ_ONLY;
    int rc = hifc_spdk_target_parse(uri, &device->target);
    rc = rc ? rc : hifc_spdk_env_start();
    rc = rc ? rc : hifc_spdk_lock_take(&device->target, device->read_only, &device->lock);
    rc = rc ? rc : hifc_spdk_connect(device);
    rc = rc ? rc : learn_geometry(device);
    if (rc) {
        spdk_close(&device->base);
        return rc;
    }
    *out = &device->base;
    return 0;
}

#define SPDK_OPS                                                                             \
    .open = spdk_open, .close = spdk_close, .register_memory = hifc_spdk_register,           \
    .unregister_memory = hifc_spdk_unregister, .qpair_open = hifc_spdk_qpair_open,           \
    .qpair_close = hifc_spdk_qpair_close, .submit = hifc_spdk_submit, .poll = hifc_spdk_poll, \
    .event_fd = hifc_spdk_event_fd, .health = hifc_spdk_health, .passthru = hifc_spdk_passthru

const struct hifc_device_ops hifc_device_spdk_pcie = {.scheme = "spdk", SPDK_OPS};
const struct hifc_device_ops hifc_device_spdk_tcp = {.scheme = "spdk+tcp", SPDK_OPS};
const struct hifc_device_ops hifc_device_spdk_rdma = {.scheme = "spdk+rdma", SPDK_OPS};
