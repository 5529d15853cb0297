# Toolchain: Windows x64, cross-compiled by GCC of mingw-w64 (Debian: g++-mingw-w64-x86-64-posix).
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)

set(triplet x86_64-w64-mingw32)
# Upstream needs std::thread: of the two thread models that Debian packs, posix has it in every version.
foreach(suffix -posix "")
  find_program(SDSAGE_MINGW_CC ${triplet}-gcc${suffix})
  find_program(SDSAGE_MINGW_CXX ${triplet}-g++${suffix})
endforeach()
if(NOT SDSAGE_MINGW_CC OR NOT SDSAGE_MINGW_CXX)
  message(FATAL_ERROR "sdsage: no ${triplet}-gcc and -g++ on PATH: install mingw-w64 (Debian: apt-get install g++-mingw-w64-x86-64-posix)")
endif()
set(CMAKE_C_COMPILER ${SDSAGE_MINGW_CC})
set(CMAKE_CXX_COMPILER ${SDSAGE_MINGW_CXX})
set(CMAKE_RC_COMPILER ${triplet}-windres)

set(CMAKE_FIND_ROOT_PATH /usr/${triplet})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)  # Python is the one of this machine
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# Windows aligns the stack to 16 bytes, and GCC keeps 32-byte vectors there with instructions that ask for 32 (GCC bug 54412):
# the assembler writes those that do not ask.
set(CMAKE_C_FLAGS_INIT -Wa,-muse-unaligned-vector-move)
set(CMAKE_CXX_FLAGS_INIT -Wa,-muse-unaligned-vector-move)
# No DLL of the compiler has to travel along; CMake would find OpenMP's DLL first.
execute_process(COMMAND ${CMAKE_C_COMPILER} -print-file-name=libgomp.a OUTPUT_VARIABLE gomp OUTPUT_STRIP_TRAILING_WHITESPACE)
set(OpenMP_gomp_LIBRARY ${gomp} CACHE FILEPATH "the static library")
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
set(CMAKE_SHARED_LINKER_FLAGS_INIT -static)
