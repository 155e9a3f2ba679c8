# SPDX-License-Identifier: Apache-2.0
"""doctor's checks of a device that is a file, a block device of the kernel or memory, at rest, and
of the software that would use it.

Those that open something need the host itself: below --sysroot there is no kernel to ask.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import json
import os
import re
import resource
import shlex
from collections.abc import Iterator
from pathlib import Path

from hifc.errors import FormatError
from hifc.namespace.stats import NamespaceStats
from hifc.native_lib.libhifc import library
from hifc_admin import scan, target, text
from hifc_admin.doctor.checks import Checks, Finding, Scene, failed, passed, warned
from hifc_admin.doctor.engine import CAP_IPC_LOCK
from hifc_admin.host import accounts, memory
from hifc_admin.host.mounts import Mount, own_mounts
from hifc_admin.result import Exit, Failure, Problem
from hifc_admin.text import size

IO_URING_SETUP = 425  # the number of the system call, on all machines that HiFC runs on
IO_URING_PARAMS_BYTES = 120
IO_URING_OFF = "/proc/sys/kernel/io_uring_disabled"
# File systems that HiFC is meant for, and what to know of others.
GOOD_FILE_SYSTEMS = ("ext4", "xfs")
FILE_SYSTEMS = {
    "tmpfs": "is memory: it is gone after a reboot, and every access is a copy by the CPU",
    "btrfs": "writes every block to a new place: slower, and the file falls apart",
    "zfs": "writes every block to a new place, and checksums it once more",
    "bcachefs": "writes every block to a new place, and checksums it once more",
    "overlay": "is a layer of a container: use a volume",
    "nfs": "is on another machine",
    "nfs4": "is on another machine",
    "cifs": "is on another machine",
    "ceph": "is on another machine",
    "9p": "is another machine's, or this one's outside a container",
    "virtiofs": "is the host's of this virtual machine",
}
# What a segment holds besides values: headers, checksums, summary. More than there is.
SEGMENT_METADATA_BYTES = 128 << 10
# Layers, heads of K and V, and their length, of the model that stands for others; in 16 bits.
USUAL_MODEL, USUAL_SHAPE = "Llama 3.1 8B", (32, 8, 128, 2)
BLOCK_TOKENS_LEAST = 32
PACKAGES = ("torch", "transformers")


# ---- the build


def build(scene: Scene) -> Iterator[Finding]:
    """Which kinds of devices this libhifc has."""
    if not scene.system.is_real:
        return
    known = schemes()
    listed = ", ".join(known)
    if scene.uri is None:
        yield passed(f"this libhifc has {listed}")
        return
    scheme = scene.uri.partition("://")[0].split("+")
    name = "+".join(scheme) if scheme[0] == "spdk" else scheme[-1]
    if name in known:
        yield passed(f"this libhifc has {name} devices", subject=scene.uri)
    else:
        yield failed(
            f"this libhifc has no {name} devices",
            f"it has {listed}",
            "install hifc again with SPDK: SPDK_DIR=$(tools/build_spdk) HIFC_SPDK=on pip install .",
            scene.uri,
        )


def schemes() -> list[str]:
    """Of the URIs that this libhifc knows."""
    return list(library().hifc_schemes().decode().split())


# ---- files


def _medium(scene: Scene) -> target.Target | None:
    """What a file URI names; None for another device."""
    medium = None if scene.uri is None else target.parse(scene.uri)
    return medium if medium is not None and medium.scheme == "file" else None


def namespace(scene: Scene) -> Iterator[Finding]:
    """Opens it read-only. Raises HiFCError, which says what is wrong."""
    if not _is_at_rest(scene):
        return
    uri = str(scene.uri)
    try:
        stats = _stats(scene)
    except FormatError as error:
        yield failed("there is no namespace on it", str(error), error.fix, uri)
        return
    fsck = f"hifc-admin fsck {shlex.quote(uri)} --payload"
    if stats.segments_damaged or stats.recovery_damaged:
        yield failed(
            "entries that had been flushed are lost",
            f"{stats.recovery_damaged} entries, {stats.segments_damaged} segments",
            f"{fsck} says more, --repair gives the room back",
            uri,
        )
        return
    entries = text.count(stats.entries, "entry", "entries")
    free = f"{stats.segments_free} of {stats.segments} segments free"
    yield passed(f"valid: {entries}, {free}", f"{fsck} reads every value", uri)


def _is_at_rest(scene: Scene) -> bool:
    """Whether the device may be opened: an engine that has it answers for it."""
    return scene.system.is_real and _medium(scene) is not None and not scene.engines


def _stats(scene: Scene) -> NamespaceStats:
    """Of the namespace, which is opened once for all checks."""
    if "stats" not in scene.memo:
        with scan.look(str(scene.uri)) as opened:
            scene.memo["stats"] = opened.stats()
    found: NamespaceStats = scene.memo["stats"]
    return found


def direct_io(scene: Scene) -> Iterator[Finding]:
    medium = _medium(scene)
    if medium is None or not scene.system.is_real:
        return
    if medium.parameters.get("direct") == "0":
        yield warned(
            "the page cache stands in between", "direct=0 in the URI", "leave it out", medium.uri
        )
        return
    try:
        os.close(os.open(medium.name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fix = "put the file on ext4 or xfs, or use a block device"
        yield warned("the page cache stands in between", f"O_DIRECT: {error}", fix, medium.uri)
    else:
        yield passed("O_DIRECT works: no page cache in between", subject=medium.uri)


def io_uring(scene: Scene) -> Iterator[Finding]:
    """Asks the kernel for a ring: a container may forbid what the kernel has."""
    medium = _medium(scene)
    if not scene.system.is_real or (scene.uri is not None and medium is None):
        return
    if medium is not None and medium.parameters.get("io") == "sync":
        yield passed("not used: io=sync in the URI")
        return
    code = _ring_error()
    if not code:
        yield passed("allowed")
        return
    disabled = scene.system.attribute(IO_URING_OFF)
    seen = f"io_uring_setup: {os.strerror(code)}"
    yield failed(
        "this process may not use io_uring",
        f"{seen}; {IO_URING_OFF}: {disabled}" if disabled else seen,
        "sysctl kernel.io_uring_disabled=0; in a container, a seccomp profile that lets io_uring "
        "through; or add io=sync to the URI, which is slower",
    )


def _ring_error() -> int:
    """0, or the errno of a ring that was asked for."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    ring = syscall(IO_URING_SETUP, 1, ctypes.create_string_buffer(IO_URING_PARAMS_BYTES))
    if ring < 0:
        return ctypes.get_errno()
    os.close(ring)
    return 0


def locked_memory(scene: Scene) -> Iterator[Finding]:
    """The pool is registered with the ring where it may be locked, and used without else."""
    if not scene.system.is_real or _medium(scene) is None:
        return
    if scene.user is not None:
        user = accounts.find_user(scene.system, scene.user)
        limit, where = memory.locked_limit(scene.system, user, None)
        limit = None if user.uid == 0 else limit
    else:
        limit, where = _own_limit(scene), "the limit of this process"
    if limit is None or limit >= memory.NEEDED_BYTES:
        shown = "any amount" if limit is None else size(limit)
        yield passed(f"{shown} of memory may be locked", where)
        return
    yield warned(
        f"{size(limit)} of memory may be locked, the default pool has more: a little slower",
        where,
        "ulimit -l unlimited, LimitMEMLOCK=infinity in a service's unit, or hifc-admin install",
    )


def _own_limit(scene: Scene) -> int | None:
    status = scene.system.attribute("/proc/self/status") or ""
    effective = re.search(r"^CapEff:\s+([0-9a-f]+)", status, re.M)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return None if effective and int(effective[1], 16) & 1 << CAP_IPC_LOCK else limit


def room(scene: Scene) -> Iterator[Finding]:
    """Whether a sparse file can still get what it promises."""
    medium = _medium(scene)
    if medium is None or not scene.system.is_real or medium.is_block_device:
        return
    status = Path(medium.name).stat()
    missing = max(0, status.st_size - status.st_blocks * 512)
    disk = os.statvfs(medium.name)
    free = disk.f_bavail * disk.f_frsize
    if missing > free:
        yield failed(
            f"the file still wants {size(missing)}, its disk has {size(free)} left",
            f"{medium.name} is sparse: {size(status.st_size)}, {size(status.st_blocks * 512)} "
            "allocated",
            "free that much on the disk, or make a smaller namespace",
            medium.uri,
        )
    elif missing:
        yield passed(
            f"{size(missing)} of the file is not allocated yet, {size(free)} is free",
            subject=medium.uri,
        )
    else:
        yield passed(f"all {size(status.st_size)} of the file is allocated", subject=medium.uri)


def file_system(scene: Scene) -> Iterator[Finding]:
    medium = _medium(scene)
    if medium is None or medium.is_block_device:
        return
    mount = _mount_of(scene, str(Path(medium.name).resolve()))
    if mount is None:
        yield warned("its file system could not be told", "/proc/self/mountinfo", "", medium.uri)
        return
    where = f"{mount.source} on {mount.folder}"
    if mount.kind in GOOD_FILE_SYSTEMS:
        yield passed(mount.kind, where, medium.uri)
        return
    known = FILE_SYSTEMS.get(mount.kind.partition(".")[0], "is not one that HiFC is tested on")
    yield warned(f"{mount.kind} {known}", where, "ext4 or xfs on a local NVMe drive", medium.uri)


def _mount_of(scene: Scene, path: str) -> Mount | None:
    """The mount that a path lies in: the last one of the longest folder hides the others."""
    found: Mount | None = None
    for mount in own_mounts(scene.system):
        inside = path == mount.folder or path.startswith(mount.folder.rstrip("/") + "/")
        if inside and (found is None or len(mount.folder) >= len(found.folder)):
            found = mount
    return found


# ---- memory


def ram(scene: Scene) -> Iterator[Finding]:
    medium = None if scene.uri is None else target.parse(scene.uri)
    if medium is None or medium.scheme != "ram":
        return
    available = memory.meminfo(scene.system, "MemAvailable")
    if available is None:
        yield warned("free memory could not be told", "/proc/meminfo", "", medium.uri)
    else:
        yield passed(f"{size(available)} of memory is free", "/proc/meminfo", medium.uri)


# ---- segments and models


def segment_size(scene: Scene) -> Iterator[Finding]:
    """A block of KV lies in one segment: how many tokens of a model that may be."""
    if not _is_at_rest(scene):
        return
    name, (layers, heads, dimension, item) = USUAL_MODEL, USUAL_SHAPE
    if scene.model is not None:
        name, (layers, heads, dimension, item) = scene.model, model_shape(scene.model)
    try:
        segment = _stats(scene).segment_size_bytes
    except FormatError:
        return  # which the check above tells
    token = 2 * layers * heads * dimension * item
    tokens = (segment - SEGMENT_METADATA_BYTES) // token
    detail = f"{size(segment)}: a block has up to {tokens} tokens of {name}"
    evidence = f"{size(token)} of KV a token: {layers} layers, {heads} heads of {dimension}"
    if tokens >= BLOCK_TOKENS_LEAST:
        yield passed(detail, evidence, str(scene.uri))
        return
    wanted = 1 << (token * BLOCK_TOKENS_LEAST + SEGMENT_METADATA_BYTES).bit_length()
    advice = f"for such a model, format it with --segment-size {size(wanted).replace(' ', '')}"
    if scene.model is None:
        advice += "; for another one, ask with --model FOLDER"
    yield warned(detail, evidence, advice, str(scene.uri))


def model_shape(folder: str) -> tuple[int, int, int, int]:
    """Layers, KV heads, their length and bytes of an item, by the config.json of a checkpoint.
    Raises Failure where it does not tell."""
    path = Path(folder)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        heads = config["num_attention_heads"]
        dimension = config.get("head_dim") or config["hidden_size"] // heads
        kind = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        shape = (
            int(config["num_hidden_layers"]),
            int(config.get("num_key_value_heads") or heads),
            int(dimension),
            4 if kind == "float32" else 2,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"{path} does not tell the shape of a model"
        fix = "name the folder of a checkpoint of transformers"
        problem = Problem("no-model", folder, detail, f"{type(error).__name__}: {error}", fix)
        raise Failure(Exit.USAGE, problem) from error
    return shape


# ---- software


def packages(scene: Scene) -> Iterator[Finding]:
    """Which torch and transformers are there. A namespace needs neither."""
    if not scene.system.is_real:
        return
    parts, old = [], []
    for name in PACKAGES:
        version, least = _version(name), _least(name)
        parts.append(f"{name} {version or 'is not installed'}")
        if version is not None and _numbers(version) < _numbers(least):
            old.append(f"{name}>={least}")
    listed = ", ".join(parts)
    if old:
        fix = f"pip install {' '.join(map(shlex.quote, old))}"
        yield warned(f"{listed}: too old for this hifc", f"it needs {', '.join(old)}", fix)
    elif "not" in listed:
        yield passed(f"{listed}: only models need them, pip install 'hifc[transformers]'")
    else:
        yield passed(listed)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _least(name: str) -> str:
    """The oldest release that the installed hifc works with, by its own metadata."""
    try:
        wanted = importlib.metadata.requires("hifc") or []
    except importlib.metadata.PackageNotFoundError:
        return ""  # a checkout that is not installed
    for line in wanted:
        match = re.match(rf"{name}\s*\(?.*?>=\s*([0-9.]+)", line)
        if match:
            return match[1]
    return ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


CHECKS: Checks = (
    ("build", build),
    ("namespace", namespace),
    ("o_direct", direct_io),
    ("io_uring", io_uring),
    ("memlock", locked_memory),
    ("room", room),
    ("file system", file_system),
    ("memory", ram),
    ("segment size", segment_size),
    ("packages", packages),
)
