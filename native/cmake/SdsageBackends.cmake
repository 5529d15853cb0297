# Which of upstream's backends and whose ggml go together. Sets SDSAGE_GGML: patched, upstream or system.
if(SD_CUDA AND SD_HIPBLAS)
  message(FATAL_ERROR "sdsage: SD_CUDA and SD_HIPBLAS are ON: ggml makes both from the same files, so one build has one of them")
endif()
if(SD_METAL AND NOT APPLE)
  message(FATAL_ERROR "sdsage: SD_METAL is ON: Metal is a part of macOS, and this is ${CMAKE_SYSTEM_NAME}")
endif()
if(SD_USE_UPSTREAM_GGML AND SD_USE_SYSTEM_GGML)
  message(FATAL_ERROR "sdsage: SD_USE_UPSTREAM_GGML and SD_USE_SYSTEM_GGML are ON: ggml comes from one place")
endif()
set(SDSAGE_GGML patched)
if(SD_USE_SYSTEM_GGML)
  set(SDSAGE_GGML system)
  set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)  # it may lie outside the folders of the system
elseif(SD_USE_UPSTREAM_GGML OR SD_HIPBLAS OR SD_MUSA)
  set(SDSAGE_GGML upstream)  # ROCm and MUSA compile the files that our edits for CUDA are in
endif()
