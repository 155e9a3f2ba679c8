/* SPDX-License-Identifier: Apache-2.0
 *
 * ram.h - what C tests need beyond the table of functions of a ram device.
 */
#ifndef HIFC_DEVICE_RAM_H
#define HIFC_DEVICE_RAM_H

/* Frees the named image. -ENOENT: there is none; -EBUSY: a device has it open. */
int hifc_ram_drop(const char *name);

#endif
