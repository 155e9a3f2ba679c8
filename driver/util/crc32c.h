/* SPDX-License-Identifier: Apache-2.0
 *
 * crc32c.h - CRC-32C (Castagnoli, reflected 0x82F63B78).
 *
 * "Raw" means initial value 0 and no final inversion: then crc(A || B) equals
 * shift(crc(A), size of B) ^ crc(B), which lets chunks that complete in any order be combined.
 */
#ifndef HIFC_CRC32C_H
#define HIFC_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Continues a raw CRC: update(update(0, A), B) == update(0, A || B). */
uint32_t hifc_crc32c_update(uint32_t crc, const void *data, size_t size_bytes);
/* The raw CRC after size_bytes further zero bytes. */
uint32_t hifc_crc32c_shift(uint32_t crc, uint64_t size_bytes);

#endif
