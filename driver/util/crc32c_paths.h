/* SPDX-License-Identifier: Apache-2.0
 *
 * crc32c_paths.h - the implementations behind crc32c.h, slowest first. The library uses the last
 * usable one; tests compare them all.
 */
#ifndef HIFC_CRC32C_PATHS_H
#define HIFC_CRC32C_PATHS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct hifc_crc32c_path {
    const char *name;
    bool (*usable)(void); /* on this machine */
    uint32_t (*update)(uint32_t crc, const void *data, size_t size_bytes);
    uint32_t (*shift)(uint32_t crc, uint64_t size_bytes);
};

extern const struct hifc_crc32c_path hifc_crc32c_paths[];
extern const unsigned hifc_crc32c_path_count;

#endif
