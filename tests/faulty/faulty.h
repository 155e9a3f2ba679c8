/* SPDX-License-Identifier: Apache-2.0
 *
 * faulty.h - what C tests ask of a faulty device beyond the table of functions. Any thread.
 *
 * device must be one that hifc_device_open returned for a faulty+ URI.
 */
#ifndef HIFC_DEVICE_FAULTY_H
#define HIFC_DEVICE_FAULTY_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"

/* The open faulty device whose inner URI has this target ("NAME" of faulty+ram://NAME?...), for
 * those who opened a namespace by its URI; NULL when there is none. */
struct hifc_device *hifc_faulty_find(const char *target);
/* Writes and flushes carried out so far. */
uint64_t hifc_faulty_count(struct hifc_device *device);
/* Blocks that a cut would put to the draw. */
uint64_t hifc_faulty_unflushed(struct hifc_device *device);
/* Cuts the power now; in flight is in the draw as well. A second cut does nothing. */
void hifc_faulty_cut(struct hifc_device *device);
/* Cuts at the nth write or flush since the device was opened (counting from 1); 0: never. */
void hifc_faulty_cut_at(struct hifc_device *device, uint64_t nth);
bool hifc_faulty_is_cut(struct hifc_device *device);
/* Reads that touch [first, last] fail from now on. -ENOSPC above HIFC_FAULTY_RANGES_MAX. */
int hifc_faulty_read_error(struct hifc_device *device, uint64_t first_lba, uint64_t last_lba);
/* One bit of each of [first, last] arrives flipped from now on. */
int hifc_faulty_flip(struct hifc_device *device, uint64_t first_lba, uint64_t last_lba);
/* The nth write or flush fails, and what it wrote is a draw; 0: none. */
void hifc_faulty_write_error(struct hifc_device *device, uint64_t nth);
/* fault_room=BYTES makes the medium thin: that much room is there for blocks that have none yet;
 * writes and allocates beyond it fail with -ENOSPC, deallocate gives room back. What has room is
 * remembered for the target until it is forgotten. With fault_copy_on_write=1 overwriting needs
 * room as well, for the moment. Sets what is left from now on. */
void hifc_faulty_room(struct hifc_device *device, uint64_t left_bytes);
/* The nth write or allocate from now on (from 1) finds the medium full, and so do all later ones;
 * 0: none. */
void hifc_faulty_full_at(struct hifc_device *device, uint64_t nth);
/* Writes and allocates since that call. */
uint64_t hifc_faulty_room_count(struct hifc_device *device);
/* The device must not be open. */
void hifc_faulty_room_forget(const char *target);
/* Forgets read errors, flips, write errors and a cut to come. */
void hifc_faulty_clear(struct hifc_device *device);

#define HIFC_FAULTY_RANGES_MAX 64u

extern const struct hifc_device_ops hifc_device_faulty; /* faulty+SCHEME://... */

#endif
