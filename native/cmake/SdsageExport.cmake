# sdsage_export(TARGET FOLDER): the shared library shows the functions of our headers and nothing else. FOLDER is where generate.py
# wrote their names. Other programs in the process may carry another ggml: nothing of ours is interposed, nothing of ours leaks.
function(sdsage_export target folder)
  if(WIN32)
    target_sources(${target} PRIVATE ${folder}/sdsage.def)
    set_target_properties(${target} PROPERTIES PREFIX "")
  else()
    target_link_options(${target} PRIVATE LINKER:--version-script=${folder}/sdsage.map LINKER:-Bsymbolic)
    set_target_properties(${target} PROPERTIES LINK_DEPENDS ${folder}/sdsage.map)
  endif()
endfunction()

# sdsage_utf8(TARGET): a program for Windows whose char* arguments and file names are UTF-8, whatever the language of the system.
function(sdsage_utf8 target)
  set(manifest ${PROJECT_SOURCE_DIR}/native/sd_cli/utf8.manifest)
  if(MSVC)
    target_sources(${target} PRIVATE ${manifest})  # the linker merges it with its own
  else()
    set(resource ${CMAKE_CURRENT_BINARY_DIR}/utf8.rc)
    file(CONFIGURE OUTPUT ${resource} CONTENT "1 24 \"${manifest}\"\n")
    target_sources(${target} PRIVATE ${resource})
  endif()
endfunction()
