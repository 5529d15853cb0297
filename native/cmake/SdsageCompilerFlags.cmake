# Flags of every target, in the words of its compiler. MSVC here is also clang-cl, which takes cl's words; nvcc's host compiler
# is cl.exe in both cases.
if(MSVC)
  # Sources are UTF-8; stable-diffusion.cpp has more sections than a plain object file holds.
  set(sdsage_flags /utf-8 /bigobj)
  # The standard preprocessor, which CUDA's headers need; clang-cl has no other.
  add_compile_options($<$<COMPILE_LANG_AND_ID:C,MSVC>:/Zc:preprocessor> $<$<COMPILE_LANG_AND_ID:CXX,MSVC>:/Zc:preprocessor>
                      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=/Zc:preprocessor>)
  # ggml masks with infinities: they stay numbers even where somebody asks for /fp:fast.
  add_compile_options($<$<COMPILE_LANG_AND_ID:C,Clang>:/clang:-fno-finite-math-only>
                      $<$<COMPILE_LANG_AND_ID:CXX,Clang>:/clang:-fno-finite-math-only>)
else()
  # __FILE__ in log lines and assertions says where in the tree, not where on the machine that built it.
  foreach(folder ${CMAKE_BINARY_DIR} ${CMAKE_SOURCE_DIR})
    list(APPEND sdsage_flags -ffile-prefix-map=${folder}/=)
  endforeach()
endif()
foreach(flag IN LISTS sdsage_flags)
  add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:${flag}>)
  add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${flag}>)
endforeach()
