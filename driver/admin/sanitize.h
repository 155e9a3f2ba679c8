/* SPDX-License-Identifier: Apache-2.0
 *
 * sanitize.h - words of NVMe Sanitize that its status and its start share.
 */
#ifndef HIFC_SANITIZE_H
#define HIFC_SANITIZE_H

#define HIFC_OPCODE_SANITIZE 0x84
#define HIFC_SC_SANITIZE_FAILED 0x1c
#define HIFC_SC_SANITIZE_IN_PROGRESS 0x1d
#define HIFC_SANITIZE_UNRESTRICTED_EXIT 8u /* AUSE */
enum { HIFC_SANITIZE_BLOCK_ERASE = 2, HIFC_SANITIZE_OVERWRITE = 3, HIFC_SANITIZE_CRYPTO_ERASE = 4 };

#endif
