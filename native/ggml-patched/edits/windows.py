"""What Windows does otherwise."""

from edits.table import CLI, COMMON, EXTEND, MODEL, UTIL, Edit, Group

_SAFETENSORS = "src/model_io/safetensors_io.cpp"
_MEDIA, _METADATA = "examples/common/media_io.cpp", "examples/cli/image_metadata.cpp"
_INCLUDE = '#include "sdsage_path.hpp"\n'
_OPEN = "    std::ifstream file(file_path, std::ios::binary);\n"
_OPEN_NAME = "    std::ifstream file(sdsage::file_name(file_path), std::ios::binary);\n"

WINDOWS = Group(
    name="windows",
    why="Windows opens a narrow file name in the code page of the program, which is not UTF-8 in Python: a model in a"
    " folder with a Chinese name would not be found. Elsewhere a name stays the string that it is. And mingw-w64 before"
    " version 11 does not know the structure by which a thread asks for full speed.",
    guard="tests/test_windows.py::test_the_library_makes_the_video_in_a_folder_with_a_chinese_name",
    drop="files are opened by std::filesystem::u8path or a wide name",
    edits=(
        Edit(
            "ggml/src/ggml-cpu/ggml-cpu.c",
            "=",
            "        #if _WIN32_WINNT >= 0x0602\n        THREAD_POWER_THROTTLING_STATE t;",
            "        #if _WIN32_WINNT >= 0x0602 && defined(THREAD_POWER_THROTTLING_CURRENT_VERSION)\n"
            "        THREAD_POWER_THROTTLING_STATE t;",
        ),
        Edit("src/util.h", "<", '#include "tensor.hpp"\n', _INCLUDE),
        Edit("src/tensor_ggml.hpp", "<", '#include "tensor.hpp"\n', _INCLUDE),
        Edit("src/tensor_ggml.hpp", "=", "    " + _OPEN, "    " + _OPEN_NAME),
        Edit(EXTEND, "=", _OPEN, _OPEN_NAME),
        Edit(
            MODEL,
            "=",
            "file.open(file_path, std::ios::binary);",
            "file.open(sdsage::file_name(file_path), std::ios::binary);",
        ),
        Edit("src/model_io/gguf_io.cpp", "=", _OPEN, _OPEN_NAME),
        Edit(
            "src/model_io/gguf_reader_ext.h",
            "=",
            "std::ifstream fin(file_path, std::ios::binary);",
            "std::ifstream fin(sdsage::file_name(file_path), std::ios::binary);",
        ),
        Edit("src/model_io/torch_legacy_io.cpp", "=", _OPEN, _OPEN_NAME),
        Edit(
            _SAFETENSORS,
            "=",
            "bool is_safetensors_file(const std::string& file_path) {\n" + _OPEN,
            "bool is_safetensors_file(const std::string& file_path) {\n" + _OPEN_NAME,
        ),
        Edit(
            _SAFETENSORS,
            "=",
            "                           std::string* error) {\n" + _OPEN,
            "                           std::string* error) {\n" + _OPEN_NAME,
        ),
        Edit(
            _SAFETENSORS,
            "=",
            "std::ofstream file(file_path, std::ios::binary);",
            "std::ofstream file(sdsage::file_name(file_path), std::ios::binary);",
        ),
        Edit(
            UTIL,
            "=",
            "    DWORD attributes = GetFileAttributesA(filename.c_str());",
            "    DWORD attributes = GetFileAttributesW(sdsage::file_name(filename).c_str());",
        ),
        Edit(
            UTIL,
            "=",
            "    DWORD attributes = GetFileAttributesA(path.c_str());",
            "    DWORD attributes = GetFileAttributesW(sdsage::file_name(path).c_str());",
        ),
        Edit(
            UTIL,
            "=",
            "CreateFileA(\n        filename.c_str(),",
            "CreateFileW(\n        sdsage::file_name(filename).c_str(),",
        ),
        # sd-cli: pictures and their folders, results, embeddings, LoRAs
        Edit(_MEDIA, ">", '#include "media_io.h"\n', _INCLUDE),
        Edit(
            _MEDIA,
            "=",
            "std::ifstream fin(fs::path(path), std::ios::binary);",
            "std::ifstream fin(sdsage::file_name(path), std::ios::binary);",
        ),
        Edit(
            _MEDIA,
            "=",
            "std::ofstream fout(fs::path(path), std::ios::binary);",
            "std::ofstream fout(sdsage::file_name(path), std::ios::binary);",
        ),
        Edit(_METADATA, ">", '#include "image_metadata.h"\n', _INCLUDE),
        Edit(
            _METADATA,
            "=",
            "std::ifstream fin(path, std::ios::binary);",
            "std::ifstream fin(sdsage::file_name(path), std::ios::binary);",
        ),
        Edit(CLI, ">", '#include "common/resource_owners.hpp"\n', _INCLUDE),
        Edit(
            CLI,
            "=",
            "    if (!fs::exists(dir) || !fs::is_directory(dir)) {",
            "    if (!fs::is_directory(sdsage::file_name(dir))) {",
        ),
        Edit(CLI, "=", "fs::directory_iterator(dir)", "fs::directory_iterator(sdsage::file_name(dir))"),
        Edit(
            CLI,
            "=",
            "fs::path out_path = cli_params.output_path;",
            "fs::path out_path = sdsage::file_name(cli_params.output_path);",
        ),
        Edit(
            CLI,
            "=",
            "fs::path img_path = format_frame_idx(pattern.string(), output_begin_idx + i);",
            "fs::path img_path = sdsage::file_name(format_frame_idx(pattern.string(), output_begin_idx + i));",
        ),
        Edit(COMMON, ">", '#include "media_io.h"\n', _INCLUDE),
        Edit(
            COMMON,
            "=",
            "    if (!fs::exists(embedding_dir) || !fs::is_directory(embedding_dir)) {",
            "    if (!fs::is_directory(sdsage::file_name(embedding_dir))) {",
        ),
        Edit(
            COMMON,
            "=",
            "fs::directory_iterator(embedding_dir)",
            "fs::directory_iterator(sdsage::file_name(embedding_dir))",
        ),
        Edit(
            COMMON,
            "=",
            "fs::path model_dir_path = model_dir;",
            "fs::path model_dir_path = sdsage::file_name(model_dir);",
        ),
        Edit(
            COMMON,
            "=",
            "model_dir_path / (model_name + ext);",
            "model_dir_path / sdsage::file_name(model_name + ext);",
        ),
        Edit(COMMON, "=", "final_path = raw_path;", "final_path = sdsage::file_name(raw_path);"),
        Edit(
            COMMON,
            "=",
            "final_path = fs::path(lora_model_dir) / raw_path;",
            "final_path = fs::path(sdsage::file_name(lora_model_dir)) / sdsage::file_name(raw_path);",
        ),
    ),
)
