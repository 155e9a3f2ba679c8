/* SPDX-License-Identifier: Apache-2.0
 *
 * Checksums and extents: every bit that a checksum must cover is covered, and nothing passes at
 * another place, in another generation or in another namespace.
 */
#include "format/layout.h"

#include "check.h"
#include "util/crc32c.h"

static const uint8_t uuid_a[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

static void fill(uint8_t *page, size_t size_bytes)
{
    for (size_t i = 0; i < size_bytes; i++) {
        page[i] = (uint8_t)(i * 7 + i / 256);
    }
}

TEST(a_sealed_page_is_valid_and_every_flipped_byte_makes_it_invalid)
{
    uint8_t page[HIFC_PAGE_BYTES];
    fill(page, sizeof page);
    hifc_page_seal(page, HIFC_MAGIC_BATCH, uuid_a, 1u << 20, 7);
    CHECK(hifc_page_valid(page, HIFC_MAGIC_BATCH, uuid_a, 1u << 20, 7));
    struct hifc_page_head head;
    memcpy(&head, page, sizeof head);
    CHECK_EQ(head.version, HIFC_FORMAT_VERSION);
    for (size_t i = 0; i < sizeof page; i++) {
        page[i] ^= 0x10;
        CHECK(!hifc_page_valid(page, HIFC_MAGIC_BATCH, uuid_a, 1u << 20, 7));
        page[i] ^= 0x10;
    }
    CHECK(hifc_page_valid(page, HIFC_MAGIC_BATCH, uuid_a, 1u << 20, 7));
}

TEST(a_page_is_bound_to_magic_namespace_place_and_generation)
{
    uint8_t page[HIFC_PAGE_BYTES], other[16];
    fill(page, sizeof page);
    hifc_page_seal(page, HIFC_MAGIC_BATCH, uuid_a, 1u << 20, 7);
    CHECK(!hifc_page_valid(page, HIFC_MAGIC_FOOTER, uuid_a, 1u << 20, 7));
    CHECK(!hifc_page_valid(page, HIFC_MAGIC_BATCH, NULL, 1u << 20, 7));
    CHECK(!hifc_page_valid(page, HIFC_MAGIC_BATCH, uuid_a, 0, 7));
    CHECK(!hifc_page_valid(page, HIFC_MAGIC_BATCH, uuid_a, 1ull << 42 | 1u << 20, 7));
    CHECK(!hifc_page_valid(page, HIFC_MAGIC_BATCH, uuid_a, 1u << 20, 8));
    CHECK(!hifc_page_valid(page, HIFC_MAGIC_BATCH, uuid_a, 1u << 20, 7 | 1ull << 40));
    for (size_t i = 0; i < sizeof other; i++) {
        memcpy(other, uuid_a, sizeof other);
        other[i] ^= 1;
        CHECK(!hifc_page_valid(page, HIFC_MAGIC_BATCH, other, 1u << 20, 7));
    }
}

TEST(pages_of_one_byte_value_are_never_valid)
{
    uint8_t page[HIFC_PAGE_BYTES];
    for (unsigned value = 0; value < 256; value += 51) {
        memset(page, (int)value, sizeof page);
        CHECK(!hifc_page_valid(page, HIFC_MAGIC_SUPER, NULL, 0, 0));
    }
}

TEST(a_summary_checksum_covers_entries_place_and_generation)
{
    struct hifc_summary_entry entries[5];
    fill((uint8_t *)entries, sizeof entries);
    uint32_t sum = hifc_summary_checksum(entries, 5, uuid_a, 4096, 3);
    CHECK(sum != hifc_summary_checksum(entries, 4, uuid_a, 4096, 3));
    CHECK(sum != hifc_summary_checksum(entries, 5, uuid_a, 8192, 3));
    CHECK(sum != hifc_summary_checksum(entries, 5, uuid_a, 4096, 4));
    uint8_t *bytes = (uint8_t *)entries;
    for (size_t i = 0; i < sizeof entries; i++) {
        bytes[i] ^= 0x80;
        CHECK(sum != hifc_summary_checksum(entries, 5, uuid_a, 4096, 3));
        bytes[i] ^= 0x80;
    }
    CHECK(hifc_summary_checksum(entries, 0, uuid_a, 4096, 3) !=
          hifc_summary_checksum(entries, 0, uuid_a, 4096, 4));
}

TEST(a_value_checksum_is_bound_to_key_length_and_parts_and_unbinds)
{
    struct hifc_key key = {{1, 2, 3}}, other;
    uint32_t bound = hifc_bind_checksum(0x12345678, &key, 1000, 1);
    CHECK_EQ(hifc_bind_checksum(bound, &key, 1000, 1), 0x12345678);
    CHECK(bound != hifc_bind_checksum(0x12345679, &key, 1000, 1));
    CHECK(bound != hifc_bind_checksum(0x12345678, &key, 1001, 1));
    CHECK(bound != hifc_bind_checksum(0x12345678, &key, 1000, 2));
    for (size_t i = 0; i < sizeof key.bytes; i++) {
        other = key;
        other.bytes[i] ^= 1;
        CHECK(bound != hifc_bind_checksum(0x12345678, &other, 1000, 1));
    }
    struct hifc_key zero = {{0}};
    CHECK(hifc_bind_checksum(0, &zero, 0, 0) != 0); /* zeroed flash proves nothing */
}

TEST(extents_round_as_the_format_says)
{
    CHECK_EQ(hifc_extent_bytes(0, 1), 0);
    CHECK_EQ(hifc_extent_bytes(1, 1), 16);
    CHECK_EQ(hifc_extent_bytes(16, 0), 16);
    CHECK_EQ(hifc_extent_bytes(17, 1), 32);
    CHECK_EQ(hifc_extent_bytes(4095, 1), 4096);
    CHECK(!hifc_extent_on_pages(4095, 1));
    CHECK(hifc_extent_on_pages(4096, 1));
    CHECK_EQ(hifc_extent_bytes(4096, 1), 4096);
    CHECK_EQ(hifc_extent_bytes(4097, 1), 8192);
    CHECK_EQ(hifc_extent_bytes(10, 2), 32);   /* value 10, table at 12, 8 bytes */
    CHECK_EQ(hifc_extent_bytes(4090, 2), 8192); /* the table does not fit the last page */
    CHECK(hifc_extent_on_pages(4090, 2));
    CHECK_EQ(hifc_extent_bytes(8184, 2), 8192); /* it fits exactly */
    CHECK_EQ(hifc_extent_bytes(8185, 2), 12288);
    CHECK_EQ(hifc_extent_bytes(HIFC_VALUE_MAX_BYTES, 1), 1u << 29);
    CHECK_EQ(hifc_extent_bytes(4096, HIFC_PARTS_MAX), 4096 + 262144);
    CHECK_EQ(hifc_table_offset(0), 0);
    CHECK_EQ(hifc_table_offset(5), 8);
    CHECK_EQ(hifc_table_offset(8), 8);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
