"""Log lines and devices."""

from edits.table import MODEL, UTIL, Edit, Group

LOG = Group(
    name="log",
    why="The log line is built in one static buffer, and loader threads log at once; a job keeps the errors as its"
    " message; the library itself must not print to stdout.",
    guard="tests/test_native.py::test_log_lines_are_whole, tests/test_cli_run.py::test_stdout_holds_results_only,"
    " tests/test_bad_models.py::test_unused_lora_tensors_print_nothing",
    drop="log_printf has no static buffer",
    edits=(
        Edit(UTIL, "<", "#define LOG_BUFFER_SIZE 4096\n", '#include "sdsage_seam.hpp"\n\n'),
        Edit(UTIL, "=", "static char log_buffer[LOG_BUFFER_SIZE + 1];", "char log_buffer[LOG_BUFFER_SIZE + 1];"),
        Edit(UTIL, "=", "    if (sd_log_cb) {\n", "    if (sdsage::note_log(level, log_buffer) && sd_log_cb) {\n"),
        Edit("src/lora.hpp", "=", "                    print_ggml_tensor(kv.second, true);\n", ""),
        Edit(
            MODEL,
            "=",
            "        if (total_tensors_processed < total_tensors_to_process) {\n",
            "        if (total_tensors_processed < total_tensors_to_process && sd_get_progress_callback() == nullptr) {\n",
        ),
    ),
)

DEVICE = Group(
    name="device",
    why="Upstream always takes the first GPU: the caller's choice comes first (sdsage_set_device).",
    guard="tests/test_context.py::test_the_engine_asks_for_the_chosen_device",
    drop="sd_ctx_params_t has a device field",
    edits=(
        Edit(UTIL, "<", "ggml_backend_t sd_get_default_backend() {", "ggml_backend_t sdsage_requested_backend();\n\n"),
        Edit(
            UTIL,
            ">",
            "ggml_backend_t sd_get_default_backend() {\n    ggml_backend_load_all_once();\n",
            "    if (ggml_backend_t requested = sdsage_requested_backend()) {\n        return requested;\n    }\n",
        ),
    ),
)
