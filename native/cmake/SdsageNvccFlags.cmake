# What nvcc adds to every command without a word in the build files: NVCC_PREPEND_FLAGS and NVCC_APPEND_FLAGS, as they
# were when the build was configured. For the build info: SDSAGE_JSON_NVCC_FLAGS, an object of JSON, with folders of
# this machine cut off.
set(SDSAGE_JSON_NVCC_FLAGS "")
foreach(name NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS)
  if(NOT "$ENV{${name}}" STREQUAL "")
    message(STATUS "sdsage: nvcc gets further flags from the environment: ${name}=$ENV{${name}}")
    string(REGEX REPLACE "[^ =,\"]*[/\\]" "" flags "$ENV{${name}}")
    string(REPLACE "\"" "\\\"" flags "${flags}")
    if(SDSAGE_JSON_NVCC_FLAGS)
      string(APPEND SDSAGE_JSON_NVCC_FLAGS ", ")
    endif()
    string(APPEND SDSAGE_JSON_NVCC_FLAGS "\"${name}\": \"${flags}\"")
  endif()
endforeach()
set(SDSAGE_JSON_NVCC_FLAGS "{${SDSAGE_JSON_NVCC_FLAGS}}")
