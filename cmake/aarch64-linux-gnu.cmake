# Toolchain file: builds for 64-bit Arm (aarch64) Linux on another machine, with Debian's cross
# compilers (gcc-aarch64-linux-gnu, g++-aarch64-linux-gnu), and runs test programs in qemu-aarch64
# (qemu-user) where it is installed.
#
#   cmake -S . -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake \
#     -DHIFC_AARCH64_SYSROOT=FOLDER
#
# HIFC_AARCH64_SYSROOT is a folder into which Debian's liburing-dev:arm64 was unpacked. It may also
# stand in the environment. Without it, liburing-dev:arm64 has to be installed on this machine.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

# CMake reads this file again in each of its own test projects, which see only what is named here.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES HIFC_AARCH64_SYSROOT)
if(NOT HIFC_AARCH64_SYSROOT)
  set(HIFC_AARCH64_SYSROOT "$ENV{HIFC_AARCH64_SYSROOT}")
endif()

set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
if(HIFC_AARCH64_SYSROOT)
  list(PREPEND CMAKE_FIND_ROOT_PATH "${HIFC_AARCH64_SYSROOT}")
  set(ENV{PKG_CONFIG_SYSROOT_DIR} "${HIFC_AARCH64_SYSROOT}")
  set(ENV{PKG_CONFIG_LIBDIR} "${HIFC_AARCH64_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig")
else()
  list(APPEND CMAKE_FIND_ROOT_PATH /)
  set(ENV{PKG_CONFIG_LIBDIR} "/usr/lib/aarch64-linux-gnu/pkgconfig")
endif()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

find_program(HIFC_QEMU_AARCH64 qemu-aarch64)
if(HIFC_QEMU_AARCH64)
  # ctest puts this in front of every test program.
  set(CMAKE_CROSSCOMPILING_EMULATOR ${HIFC_QEMU_AARCH64} -L /usr/aarch64-linux-gnu)
endif()
