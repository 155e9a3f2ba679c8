/* SPDX-License-Identifier: Apache-2.0
 *
 * What an NVMe drive says of itself, Format NVM and Sanitize, against a drive that answers commands
 * out of a script: no emulated drive here knows sanitize.
 */
#include "check.h"

#include <errno.h>

#include "device/command.h"
#include "util/error.h"
#include "admin/drive.h"
#include "format/layout.h"

#define SIZE (1u << 30)
enum { IDENTIFY = 0x06, REPORT = 0x0e, FORMAT = 0x80, GET_LOG = 0x02, SANITIZE = 0x84 };
enum { NEVER = 0, SUCCEEDED = 1, RUNNING = 2, FAILED = 3, DEALLOCATED = 4 };

struct drive {
    struct hifc_device base;
    /* the script */
    uint8_t controller[HIFC_PAGE_BYTES], space[HIFC_PAGE_BYTES];
    uint32_t active, allocated; /* namespaces */
    bool fails_report, wants_extended, fails_log, never_starts;
    uint8_t report[HIFC_PAGE_BYTES];
    uint16_t sstat;
    uint32_t scdw10;
    uint32_t steps;  /* looks at the log until it has ended */
    uint16_t ending; /* SSTAT then */
    /* what was seen */
    uint32_t formats, sanitizes, looks, format_cdw10;
};

static void list(uint8_t *page, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        page[4 * i] = (uint8_t)(i + 1);
    }
}

static int identify_answer(struct drive *drive, const struct hifc_nvme_passthru *command)
{
    CHECK_EQ(command->data_bytes, HIFC_PAGE_BYTES);
    memset(command->data, 0, command->data_bytes);
    switch (command->cdw10) {
    case 0:
        CHECK_EQ(command->nsid, 1);
        memcpy(command->data, drive->space, HIFC_PAGE_BYTES);
        return 0;
    case 1:
        memcpy(command->data, drive->controller, HIFC_PAGE_BYTES);
        return 0;
    case 2:
        list(command->data, drive->active);
        return 0;
    default:
        CHECK_EQ(command->cdw10, 0x10);
        list(command->data, drive->allocated);
        return drive->allocated ? 0 : -EIO;
    }
}

static int log_answer(struct drive *drive, const struct hifc_nvme_passthru *command)
{
    uint8_t *log = command->data;
    CHECK_EQ(command->cdw10, 127u << 16 | 0x81);
    drive->looks++;
    if (drive->fails_log) {
        return -EIO;
    }
    if (drive->sstat == RUNNING && drive->steps-- == 0) {
        drive->sstat = drive->ending;
    }
    uint16_t progress = drive->sstat == RUNNING ? (uint16_t)(65536 / (drive->steps + 2)) : 0xffff;
    uint32_t block_s = 90, crypto_s = UINT32_MAX;
    memset(log, 0, command->data_bytes);
    memcpy(log, &progress, 2);
    memcpy(log + 2, &drive->sstat, 2);
    memcpy(log + 4, &drive->scdw10, 4);
    memcpy(log + 12, &block_s, 4);
    memcpy(log + 16, &crypto_s, 4);
    return 0;
}

static int passthru(struct hifc_device *base, struct hifc_nvme_passthru *command)
{
    struct drive *drive = (struct drive *)base;
    CHECK(command->timeout_ms > 0);
    CHECK_EQ(command->io_queue, command->opcode == REPORT);
    switch (command->opcode) {
    case IDENTIFY:
        return identify_answer(drive, command);
    case GET_LOG:
        return log_answer(drive, command);
    case REPORT:
        if (drive->fails_report || (drive->wants_extended && !(command->cdw11 & 1))) {
            return -EIO;
        }
        memcpy(command->data, drive->report, HIFC_PAGE_BYTES);
        return 0;
    case FORMAT:
        drive->formats++;
        drive->format_cdw10 = command->cdw10;
        return 0;
    default:
        CHECK_EQ(command->opcode, SANITIZE);
        drive->sanitizes++;
        if (!drive->never_starts) {
            drive->sstat = RUNNING;
            drive->scdw10 = command->cdw10;
        }
        return 0;
    }
}

static const struct hifc_device_ops drive_ops = {.scheme = "script", .passthru = passthru};

/* One private namespace of 4 KiB blocks; Format with crypto erase; sanitize with both erases. */
static struct drive make(void)
{
    struct drive drive = {.base.ops = &drive_ops, .active = 1, .ending = SUCCEEDED, .steps = 3};
    uint64_t blocks = SIZE / 4096;
    drive.base.geometry = (struct hifc_geometry){.size_bytes = SIZE, .lba_bytes = 4096, .nsid = 1};
    strcpy(drive.base.uri, "script://drive");
    memcpy(drive.space, &blocks, 8);
    drive.space[26] = 1;
    drive.space[128 + 4 + 2] = 12;
    drive.controller[256] = 2;
    drive.controller[524] = 4;
    drive.controller[328] = 3;
    return drive;
}

static int sanitize(struct drive *drive)
{
    return hifc_sanitize_device(&drive->base, NULL, NULL, 0, 60000);
}

TEST(a_sanitize_is_started_once_and_waited_for)
{
    struct drive drive = make();
    CHECK_EQ(sanitize(&drive), 0);
    CHECK_EQ(drive.sanitizes, 1);
    CHECK_EQ(drive.scdw10, 2 | 8); /* block erase, and it may be left if it fails */
    CHECK_EQ(drive.looks, 1 + 4);  /* one before */
}

TEST(crypto_erase_where_there_is_no_block_erase)
{
    struct drive drive = make();
    drive.controller[328] = 1;
    drive.ending = DEALLOCATED; /* a success as well */
    CHECK_EQ(sanitize(&drive), 0);
    CHECK_EQ(drive.scdw10 & 7, 4);
    drive.controller[328] = 4; /* overwrite alone wears the drive for hours: not asked for here */
    CHECK_EQ(sanitize(&drive), -ENOTSUP);
    drive.controller[328] = 0;
    CHECK_EQ(sanitize(&drive), -ENOTSUP);
    CHECK_EQ(drive.sanitizes, 1);
}

TEST(one_that_runs_already_is_waited_for)
{
    struct drive drive = make();
    struct hifc_device_info info = {0};
    drive.sstat = RUNNING;
    drive.scdw10 = 3; /* of somebody who asked for an overwrite */
    drive.active = 2;
    CHECK_EQ(hifc_drive_describe(&drive.base, &info), 0);
    CHECK_EQ(info.sanitize.state, HIFC_SANITIZE_RUNNING);
    CHECK_EQ(info.sanitize.action, 3);
    CHECK_EQ(info.sanitize.progress, 65536 / 4);
    CHECK_EQ(sanitize(&drive), 0);
    CHECK_EQ(drive.sanitizes, 0);
}

TEST(a_failed_sanitize_is_told_and_another_one_may_follow)
{
    struct drive drive = make();
    struct hifc_error error;
    drive.ending = FAILED;
    CHECK_EQ(sanitize(&drive), -EIO);
    hifc_error_copy(&error);
    CHECK_EQ(error.sc, 0x1c);
    CHECK(last_error_says("until another sanitize succeeds"));
    drive.ending = SUCCEEDED;
    drive.steps = 1;
    CHECK_EQ(sanitize(&drive), 0);
    CHECK_EQ(drive.sanitizes, 2);

    drive.sstat = FAILED;
    drive.scdw10 = 2; /* restricted: the drive takes only another restricted one */
    drive.steps = 1;
    CHECK_EQ(sanitize(&drive), 0);
    CHECK_EQ(drive.scdw10, 2);
}

TEST(a_success_of_another_sanitize_is_none_of_this_one)
{
    struct drive drive = make();
    drive.never_starts = true;
    drive.sstat = SUCCEEDED;
    drive.scdw10 = 4;
    CHECK_EQ(sanitize(&drive), -EIO);
    CHECK(last_error_says("does not say that it succeeded"));
    drive.sstat = 6; /* nothing that the specification knew */
    CHECK_EQ(sanitize(&drive), -EPERM);
    CHECK(last_error_says("does not tell whether one runs"));
}

TEST(what_a_sanitize_would_reach_beyond_the_namespace_refuses_it)
{
    struct drive fine = make();
    struct drive drive = fine;
    drive.active = 2;
    CHECK_EQ(sanitize(&drive), -EPERM);
    CHECK(last_error_says("all namespaces"));
    drive = fine;
    drive.controller[256] |= 8; /* one is not attached, so only the other list has it */
    drive.allocated = 2;
    CHECK_EQ(sanitize(&drive), -EPERM);
    drive.allocated = 0;     /* it does not give that list: as many as there can be */
    drive.controller[516] = 32;
    CHECK_EQ(sanitize(&drive), -EPERM);
    drive = fine;
    drive.space[30] = 1;
    CHECK_EQ(sanitize(&drive), -EPERM);
    CHECK(last_error_says("share"));
    drive = fine;
    drive.base.geometry.size_bytes = SIZE / 2; /* a partition */
    CHECK_EQ(sanitize(&drive), -EPERM);
    drive = fine;
    drive.fails_log = true;
    CHECK_EQ(sanitize(&drive), -EPERM);
    CHECK_EQ(drive.sanitizes, 0);
}

TEST(a_reserved_namespace_is_neither_sanitized_nor_formatted)
{
    struct drive drive = make();
    drive.controller[520] = 0x20;
    CHECK_EQ(hifc_drive_format(&drive.base, true), 0); /* nobody has registered */
    CHECK_EQ(drive.format_cdw10, 1 | 2 << 9);
    drive.report[4] = 1; /* write exclusive */
    CHECK_EQ(sanitize(&drive), -EPERM);
    CHECK(last_error_says("reserved"));
    CHECK_EQ(hifc_drive_format(&drive.base, true), -EPERM);
    drive.report[4] = 0;
    drive.report[5] = 1; /* registered */
    drive.wants_extended = true;
    CHECK_EQ(hifc_drive_format(&drive.base, false), -EPERM);
    drive.fails_report = true;
    CHECK_EQ(hifc_drive_format(&drive.base, false), -EPERM);
    CHECK(last_error_says("does not tell"));
    CHECK_EQ(drive.formats, 1);
    CHECK_EQ(drive.sanitizes, 0);
}

static int stop_at_half(const struct hifc_sanitize_status *status, void *count)
{
    CHECK_EQ(status->estimate_s, 90);
    ++*(int *)count;
    return status->progress >= 65536 / 2;
}

TEST(who_no_longer_waits_leaves_the_drive_at_it)
{
    struct drive drive = make();
    int count = 0;
    CHECK_EQ(hifc_sanitize_device(&drive.base, stop_at_half, &count, 0, 60000), -ECANCELED);
    CHECK_EQ(count, 3); /* a quarter, a third, a half */
    drive.steps = 2;
    CHECK_EQ(hifc_sanitize_device(&drive.base, NULL, NULL, 0, 60000), 0);
    CHECK_EQ(drive.sanitizes, 1);
    drive.steps = 1000;
    CHECK_EQ(hifc_sanitize_device(&drive.base, NULL, NULL, 0, 0), -ETIMEDOUT);
    CHECK(last_error_says("goes on"));
}

TEST(an_io_error_during_a_sanitize_says_so)
{
    struct drive drive = make();
    struct hifc_error error;
    drive.sstat = RUNNING;
    hifc_fail_command(-EIO, 0, HIFC_SC_INTERNAL, 0x02, 8, 1, 4096, "script://drive");
    CHECK_EQ(hifc_sanitize_explain(&drive.base, -EIO), -EIO);
    hifc_error_copy(&error);
    CHECK_EQ(error.sc, 0x1d);
    CHECK_EQ(error.lba, 8);
    CHECK(last_error_says("Sanitize In Progress"));
    drive.sstat = NEVER;
    hifc_fail_command(-EIO, 2, HIFC_SC_UNRECOVERED_READ, 0x02, 8, 1, 4096, "script://drive");
    CHECK_EQ(hifc_sanitize_explain(&drive.base, -EIO), -EIO);
    CHECK(last_error_says("Unrecovered Read"));
    CHECK_EQ(hifc_sanitize_explain(&drive.base, -ENODEV), -ENODEV);
    CHECK_EQ(hifc_sanitize_explain(NULL, -EIO), -EIO);
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
