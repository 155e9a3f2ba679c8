/* SPDX-License-Identifier: Apache-2.0
 *
 * ram_switch.c - the ram device with a switch for its copying, in place of driver/device/ram.c.
 *
 * What a block costs without its data movement is measured, not guessed: with the switch off the
 * same code runs, less the two memcpy calls that move the bytes of a command. Only a benchmark links
 * this. While it is off nothing that was written can be read back; so format, open and close run
 * with it on.
 */
#include <stdbool.h>
#include <string.h>

#include "bench.h"

static bool copies = true;

void hifc_bench_ram_copies(int on)
{
    copies = on;
}

static void copy_if_on(void *to, const void *from, size_t size_bytes)
{
    if (copies) {
        memcpy(to, from, size_bytes);
    }
}

#define memcpy copy_if_on
#include "device/ram.c" /* NOLINT */
