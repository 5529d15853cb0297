"""A ggml that is installed, for SD_USE_SYSTEM_GGML."""

from edits.table import Edit, Group

SYSTEM = Group(
    name="system-ggml",
    why="ggml's package does not tell its users the length of names that it was built with, and tensors have another size"
    " with another one; built by itself from the edited tree it takes stable-diffusion.cpp's and says so, and says that it"
    " has these edits (native/cmake/SdsageSystemGgml.cmake). The number is raised with every edit below ggml/ that the rest"
    " of the engine depends on.",
    guard="tests/test_build_options.py::test_an_installed_ggml_of_the_edited_tree_is_taken,"
    " tests/test_build_options.py::test_another_ggml_is_refused",
    drop="ggml has no GGML_MAX_NAME, or its package defines it for its users",
    edits=(
        Edit(
            "ggml/CMakeLists.txt",
            ">",
            'project("ggml" C CXX ASM)\n',
            "set(GGML_MAX_NAME 128)\nset(GGML_SDSAGE_API 2)\nadd_compile_definitions(GGML_MAX_NAME=${GGML_MAX_NAME})\n",
        ),
        Edit(
            "ggml/cmake/ggml-config.cmake.in",
            "<",
            "    add_library(ggml::all INTERFACE IMPORTED)\n",
            "    set_property(TARGET ggml::ggml APPEND PROPERTY INTERFACE_COMPILE_DEFINITIONS"
            " GGML_MAX_NAME=${GGML_MAX_NAME})\n\n",
        ),
    ),
)
