/* SPDX-License-Identifier: Apache-2.0
 *
 * lock.h - one process owns a device: an advisory lock on what stands behind it (lock.c).
 */
#ifndef HIFC_DEVICE_LOCK_H
#define HIFC_DEVICE_LOCK_H

#include <stdbool.h>

/* Takes the lock on an open file or block device, exclusive or shared. -EBUSY names who holds it,
 * within a second, or some ten if the holder died and the drive does not give its I/O back. */
int hifc_lock_take(int fd, bool shared, const char *what);
/* Nothing is in flight on the descriptor any more. */
void hifc_lock_drop(int fd);

#endif
