# The CUDA language: which toolkit, which architectures, and where the installed library finds the CUDA libraries.
# A compiler that was chosen by name stays; else cuda_toolkit.py finds the system's or joins NVIDIA's wheels.
set(sdsage_joined ${CMAKE_BINARY_DIR}/cuda)
set(sdsage_only "")
set(sdsage_advice "")
if(CMAKE_CUDA_COMPILER STREQUAL "${sdsage_joined}/bin/nvcc")
  set(sdsage_only --wheels)  # configured again: the wheels may lie elsewhere now
  set(sdsage_advice "This build folder was made with NVIDIA's wheels: for another compiler take another folder.")
endif()
if(NOT CMAKE_CUDA_COMPILER OR sdsage_only)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cuda_toolkit.py --into ${sdsage_joined} --cublas --cc ${CMAKE_C_COMPILER} ${sdsage_only}
    OUTPUT_VARIABLE sdsage_nvcc ERROR_VARIABLE sdsage_problem RESULT_VARIABLE sdsage_failed OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(sdsage_failed)
    message(FATAL_ERROR "${sdsage_problem}${sdsage_advice}")
  endif()
  set(CMAKE_CUDA_COMPILER ${sdsage_nvcc} CACHE FILEPATH "CUDA compiler" FORCE)
endif()
message(STATUS "sdsage: CUDA compiler ${CMAKE_CUDA_COMPILER}")

include(SdsageCudaArchitectures)
enable_language(CUDA)

if(WIN32)
  return()  # the driver comes with an import library, and a DLL names no folders: sdsage/_ffi.py does
endif()
# Installed as sdsage/_lib/libsdsage.so, the library finds the run-time wheels beside the package (extra cuda).
string(REGEX MATCH "^[0-9]+" sdsage_cuda_major ${CMAKE_CUDA_COMPILER_VERSION})
list(APPEND CMAKE_INSTALL_RPATH "$ORIGIN/../../nvidia/cu${sdsage_cuda_major}/lib")

# The driver's library is part of no toolkit. A program that links libsdsage is built without it, and finds it when it runs.
add_link_options($<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:LINKER:--allow-shlib-undefined>)
