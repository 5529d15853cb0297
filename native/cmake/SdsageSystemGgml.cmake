# SD_USE_SYSTEM_GGML: an installed ggml, which must be the one that the edited tree gives. Another one has other sizes of its
# structs, or lacks what the kernels need, and would fail at run time. docs/building.md says how to make it.
# Reads `tree`.
set(sdsage_advice "Build it from the edited tree (docs/building.md, \"An installed ggml\") and name its folder with "
  "-DCMAKE_PREFIX_PATH, or leave out SD_USE_SYSTEM_GGML.")
string(CONCAT sdsage_advice ${sdsage_advice})
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
find_package(ggml CONFIG QUIET)
if(NOT ggml_FOUND)
  message(FATAL_ERROR "sdsage: SD_USE_SYSTEM_GGML is ON, and there is no CMake package of ggml. ${sdsage_advice}")
endif()

get_target_property(sdsage_definitions ggml::ggml INTERFACE_COMPILE_DEFINITIONS)
if(NOT "GGML_MAX_NAME=128" IN_LIST sdsage_definitions)
  message(FATAL_ERROR "sdsage: the ggml in ${ggml_DIR} does not say GGML_MAX_NAME=128 to those who use it: it was built with "
    "another length of names (64 is ggml's own), and its tensors have another size than stable-diffusion.cpp's. ${sdsage_advice}")
endif()
set(sdsage_api 2)  # in the edits, group "system-ggml"
if(NOT GGML_SDSAGE_API STREQUAL sdsage_api)
  message(FATAL_ERROR "sdsage: the ggml in ${ggml_DIR} has not the edits that SageAttention needs (it says "
    "\"${GGML_SDSAGE_API}\", and this source needs \"${sdsage_api}\"). ${sdsage_advice}")
endif()
foreach(header ggml.h ggml-alloc.h ggml-backend.h ggml-cpu.h gguf.h)
  file(SHA256 ${tree}/ggml/include/${header} sdsage_ours)
  set(sdsage_theirs "missing")
  if(EXISTS ${GGML_INCLUDE_DIR}/${header})
    file(SHA256 ${GGML_INCLUDE_DIR}/${header} sdsage_theirs)
  endif()
  if(NOT sdsage_theirs STREQUAL sdsage_ours)
    message(FATAL_ERROR "sdsage: ${GGML_INCLUDE_DIR}/${header} is not that of the pinned source package: the ggml "
      "in ${ggml_DIR} is of another version. ${sdsage_advice}")
  endif()
endforeach()

set(sdsage_has_cuda OFF)
if(TARGET ggml::ggml-cuda)
  set(sdsage_has_cuda ON)
endif()
if(SD_CUDA AND NOT sdsage_has_cuda)
  message(FATAL_ERROR "sdsage: SD_CUDA is ON, and the ggml in ${ggml_DIR} was built without CUDA. ${sdsage_advice}")
elseif(sdsage_has_cuda AND NOT SD_CUDA)
  message(FATAL_ERROR "sdsage: the ggml in ${ggml_DIR} was built with CUDA: configure with -DSD_CUDA=ON")
endif()
message(STATUS "sdsage: ggml in ${ggml_DIR}")
