# Sets HIFC_SPDK_FOUND, HIFC_SPDK_INCLUDE_DIRS and HIFC_SPDK_LINK_OPTIONS.
# SPDK_DIR names a prefix that carries lib/pkgconfig/hifc-spdk.pc, as tools/build_spdk makes it.
set(HIFC_SPDK_FOUND FALSE)
if(HIFC_SPDK STREQUAL "off")
  message(STATUS "SPDK: off (HIFC_SPDK=off); spdk devices will say that they are missing")
  return()
endif()
if(NOT HIFC_SPDK MATCHES "^(auto|on)$")
  message(FATAL_ERROR "HIFC_SPDK=${HIFC_SPDK}: use auto, on or off")
endif()

if(NOT SPDK_DIR AND DEFINED ENV{SPDK_DIR})
  set(SPDK_DIR "$ENV{SPDK_DIR}")
endif()
if(SPDK_DIR)
  set(ENV{PKG_CONFIG_PATH} "${SPDK_DIR}/lib/pkgconfig:$ENV{PKG_CONFIG_PATH}")
endif()
pkg_check_modules(SPDK QUIET hifc-spdk)
if(NOT SPDK_FOUND)
  pkg_check_modules(SPDK QUIET spdk_nvme spdk_env_dpdk spdk_sock_posix spdk_syslibs)
endif()

if(SPDK_FOUND)
  set(HIFC_SPDK_FOUND TRUE)
  set(HIFC_SPDK_INCLUDE_DIRS ${SPDK_STATIC_INCLUDE_DIRS} ${SPDK_INCLUDE_DIRS})
  # The constructors that register transports and sockets are referenced by nobody.
  set(HIFC_SPDK_LINK_OPTIONS ${SPDK_STATIC_LDFLAGS} -Wl,--wrap=rte_telemetry_init)
  # Newer releases want to be told how large the struct is that they fill.
  include(CheckStructHasMember)
  set(CMAKE_REQUIRED_INCLUDES ${HIFC_SPDK_INCLUDE_DIRS})
  check_struct_has_member("struct spdk_env_opts" opts_size "spdk/env.h" HIFC_SPDK_ENV_OPTS_SIZE)
  unset(CMAKE_REQUIRED_INCLUDES)
  message(STATUS "SPDK: ${SPDK_VERSION} ${SPDK_PREFIX}")
elseif(HIFC_SPDK STREQUAL "on")
  message(FATAL_ERROR "HIFC_SPDK=on but no SPDK was found: run tools/build_spdk and pass "
                      "SPDK_DIR=<the prefix it prints>, or install SPDK's pkg-config files")
else()
  message(STATUS "SPDK: not found; spdk devices will say how to get it (tools/build_spdk)")
endif()
