# Checks what the build needs before CMake looks for a compiler, so that everything that is missing is
# named at once, in one message, with the command that installs it. Sets PKG_CONFIG_EXECUTABLE and,
# from pkg-config, the URING_ variables.
set(HIFC_MISSING_THINGS "")
set(HIFC_MISSING_PACKAGES "")

function(hifc_missing thing)
  list(APPEND HIFC_MISSING_THINGS "${thing}")
  list(APPEND HIFC_MISSING_PACKAGES ${ARGN})
  set(HIFC_MISSING_THINGS "${HIFC_MISSING_THINGS}" PARENT_SCOPE)
  set(HIFC_MISSING_PACKAGES "${HIFC_MISSING_PACKAGES}" PARENT_SCOPE)
endfunction()

# hifc_need_compiler(LANGUAGE VARIABLE THING PACKAGE NAMES...): VARIABLE of the environment or
# CMAKE_LANGUAGE_COMPILER names the compiler where one of them is set, as CMake itself has it.
function(hifc_need_compiler language variable thing package)
  set(names ${ARGN})
  if(CMAKE_${language}_COMPILER)
    list(GET CMAKE_${language}_COMPILER 0 names)
  elseif(NOT "$ENV{${variable}}" STREQUAL "")
    separate_arguments(names UNIX_COMMAND "$ENV{${variable}}")
    list(GET names 0 names)
    string(APPEND thing " (${variable}=$ENV{${variable}})")
  endif()
  find_program(HIFC_FOUND_${language} NAMES ${names})
  if(NOT HIFC_FOUND_${language})
    hifc_missing("${thing}" ${package})
    set(HIFC_MISSING_THINGS "${HIFC_MISSING_THINGS}" PARENT_SCOPE)
    set(HIFC_MISSING_PACKAGES "${HIFC_MISSING_PACKAGES}" PARENT_SCOPE)
  endif()
  unset(HIFC_FOUND_${language} CACHE)
endfunction()

hifc_need_compiler(C CC "a C compiler" gcc cc gcc clang)
hifc_need_compiler(CXX CXX "a C++ compiler, for the CPU build of the kernels in native/" g++
                   c++ g++ clang++)
find_package(PkgConfig QUIET)
if(NOT PKG_CONFIG_FOUND)
  hifc_missing("pkg-config" pkg-config liburing-dev)
else()
  pkg_check_modules(URING QUIET liburing>=2.3)
  if(NOT URING_FOUND)
    pkg_check_modules(HIFC_ANY_URING QUIET liburing)
    if(HIFC_ANY_URING_FOUND)
      hifc_missing("liburing 2.3 or newer (${HIFC_ANY_URING_VERSION} is installed)" liburing-dev)
    else()
      hifc_missing("liburing 2.3 or newer" liburing-dev)
    endif()
  endif()
endif()

if(HIFC_MISSING_THINGS)
  list(JOIN HIFC_MISSING_THINGS "; " HIFC_MISSING_THINGS)
  list(JOIN HIFC_MISSING_PACKAGES " " HIFC_MISSING_PACKAGES)
  message(FATAL_ERROR "HiFC cannot be built, this is missing: ${HIFC_MISSING_THINGS}.\n"
                      "On Debian and Ubuntu run:  apt install ${HIFC_MISSING_PACKAGES}\n")
endif()
