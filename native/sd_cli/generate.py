"""Writes what follows from the C headers, so that nothing about the structs is written twice.

    python generate.py --headers stable-diffusion.h sdsage.h --out DIR

DIR/cdef.h              the ABI version, and both headers without preprocessor lines, for cffi
DIR/cdef.cffi           cdef.h as cffi has read it, which spares every start a tenth of a second; only where cffi is
DIR/sdsage_layout.inc   size and offset of the last field of every struct, as the compiler sees them
DIR/params_json.cpp     sdsage_params_json: the parameter structs as JSON
DIR/sdsage.map, .def    the functions of both headers, as the only visible symbols; .def for Windows
"""

import argparse
import contextlib
import io
import re
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Field:
    type: str  # without const and enum: "char*", "bool", "sd_slg_params_t"
    name: str


def clean(text: str) -> str:
    """The declarations alone: what ffi.cdef takes."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"#ifdef __cplusplus.*?#endif[^\n]*", "", text, flags=re.S)
    text = re.sub(r"^\s*#.*?(?<!\\)$", "", text, flags=re.M)
    text = re.sub(r"\bSD_API\s+", "", text)
    text = re.sub(r"[ \t]+", " ", text)
    return re.sub(r"\n\s*\n+", "\n", text).strip() + "\n"


def abi_version(headers: list[Path]) -> str:
    """SDSAGE_ABI_VERSION: the package compares it before it loads the library."""
    (version,) = re.findall(
        r"#define SDSAGE_ABI_VERSION (\d+)", "".join(h.read_text(encoding="utf-8") for h in headers)
    )
    return str(version)


def structs(cdef: str) -> dict[str, list[Field]]:
    """Fields of every `typedef struct { ... } name;`, in order."""
    found = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", cdef, flags=re.S):
        fields = []
        for declaration in filter(None, (d.strip() for d in body.split(";"))):
            match = re.fullmatch(r"(?:const )?(?:enum )?(\w+ ?\*?) ?(\w+)(\[\d+\])?", declaration)
            if match is None:
                raise SystemExit(f"generate.py: struct {name}: can't read {declaration!r}")
            fields.append(Field(match[1].replace(" ", "") + (match[3] or ""), match[2]))
        found[name] = fields
    return found


def functions(cdef: str) -> list[str]:
    """Names of the declared functions."""
    declarations = re.sub(r"\{.*?\}", "", cdef, flags=re.S)
    return sorted(set(re.findall(r"(\w+)\s*\([^()]*\);", re.sub(r"typedef [^;]*;", "", declarations))))


def version_script(names: list[str]) -> str:
    """Linker version script that shows these functions and hides everything else."""
    return "{\n  global:\n    " + ";\n    ".join(names) + ";\n  local: *;\n};\n"


def module_definition(names: list[str]) -> str:
    """The same for a DLL."""
    return "EXPORTS\n" + "".join(f"    {name}\n" for name in names)


def layout(all_structs: dict[str, list[Field]]) -> str:
    """A C++ string constant that is computed when the library starts, from sizeof and offsetof."""
    lines = [
        "#include <cstddef>",
        "#include <string>",
        "static const std::string sdsage_layout_text =",
        "    std::string()",
    ]
    for name, fields in all_structs.items():
        lines.append(
            f'    + "{name} " + std::to_string(sizeof({name})) + " " '
            f'+ std::to_string(offsetof({name}, {fields[-1].name})) + "\\n"'
        )
    return "\n".join(lines) + ";\n#define SDSAGE_LAYOUT sdsage_layout_text.c_str()\n"


# Pointers whose length is in another field.
LENGTHS = {
    "embeddings": "embedding_count",
    "layers": "layer_count",
    "custom_sigmas": "custom_sigmas_count",
    "id_images": "id_images_count",
    "loras": "lora_count",
    "ref_images": "ref_images_count",
    "control_frames": "control_frames_size",
}
ROOTS = ("sd_ctx_params_t", "sd_img_gen_params_t", "sd_vid_gen_params_t")


def writer(name: str, fields: list[Field], known: dict[str, list[Field]]) -> str:
    """C++ of `void put(Json & j, const NAME & s)`."""
    lines = [f"void put(Json & j, const {name} & s) {{", "    j.open();"]
    for f in fields:
        if f.name in LENGTHS:
            lines.append(f'    j.key("{f.name}"); put_list(j, s.{f.name}, s.{LENGTHS[f.name]});')
        elif f.type.endswith("*") and f.type != "char*":
            raise SystemExit(f"generate.py: {name}.{f.name}: a pointer without a known length")
        else:
            value = (
                f"static_cast<int>(s.{f.name})"
                if f.type.endswith("_t") and f.type not in known and f.type not in INTS
                else f"s.{f.name}"
            )
            lines.append(f'    j.key("{f.name}"); put(j, {value});')
    return "\n".join([*lines, "    j.close();", "}"])


INTS = {"int32_t", "uint32_t", "int64_t", "size_t"}

JSON_HEAD = """\
// Written by generate.py from the public headers.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "sdsage.h"

namespace {

struct Json {
    std::string text;
    bool first = true;

    void open() { text += '{'; first = true; }
    void close() { text += '}'; first = false; }
    void comma() { if (!first) text += ", "; first = false; }
    void key(const char * name) { comma(); text += '"'; text += name; text += "\\": "; }
};

void put(Json & j, bool b) { j.text += b ? "true" : "false"; }
void put(Json & j, int v) { j.text += std::to_string(v); }
void put(Json & j, uint32_t v) { j.text += std::to_string(v); }
void put(Json & j, int64_t v) { j.text += std::to_string(v); }
void put(Json & j, size_t v) { j.text += std::to_string(v); }

void put(Json & j, float v) {
    char buf[32];
    if (std::isfinite(v)) {
        std::snprintf(buf, sizeof(buf), "%.9g", v);
        j.text += buf;
    } else {
        j.text += std::isnan(v) ? "\\"nan\\"" : v > 0 ? "\\"inf\\"" : "\\"-inf\\"";
    }
}

// NULL and "" mean the same to the engine.
void put(Json & j, const char * s) {
    j.text += '"';
    for (; s != nullptr && *s != '\\0'; s++) {
        const unsigned char c = static_cast<unsigned char>(*s);
        if (c == '"' || c == '\\\\') {
            j.text += '\\\\';
            j.text += *s;
        } else if (c < 0x20) {
            char buf[8];
            std::snprintf(buf, sizeof(buf), "\\\\u%04x", c);
            j.text += buf;
        } else {
            j.text += *s;
        }
    }
    j.text += '"';
}

// An image by its size and a 64-bit FNV-1a of its pixels.
void put(Json & j, const sd_image_t & s) {
    if (s.data == nullptr) {
        j.text += "null";
        return;
    }
    uint64_t hash  = 14695981039346656037ull;
    const size_t n = size_t(s.width) * s.height * s.channel;
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ s.data[i]) * 1099511628211ull;
    }
    char buf[96];
    const unsigned long long shown = hash;
    std::snprintf(buf, sizeof(buf), "\\"%ux%ux%u fnv1a %016llx\\"", s.width, s.height, s.channel, shown);
    j.text += buf;
}

template <class T> void put_list(Json & j, const T * items, size_t n) {
    j.text += '[';
    for (size_t i = 0; items != nullptr && i < n; i++) {
        j.text += i ? ", " : "";
        put(j, items[i]);
    }
    j.text += ']';
    j.first = false;
}
"""

JSON_TAIL = """
}  // namespace

extern "C" char * sdsage_params_json(const sd_ctx_params_t * ctx, const sd_img_gen_params_t * img,
                                     const sd_vid_gen_params_t * vid) {
    Json j;
    j.open();
    if (ctx) { j.key("ctx"); put(j, *ctx); }
    if (img) { j.key("img"); put(j, *img); }
    if (vid) { j.key("vid"); put(j, *vid); }
    j.close();
    char * out = static_cast<char *>(std::malloc(j.text.size() + 1));
    if (out != nullptr) {
        std::memcpy(out, j.text.c_str(), j.text.size() + 1);
    }
    return out;
}
"""


def reachable(root: str, known: dict[str, list[Field]], done: list[str]) -> None:
    """Appends the structs that `root` holds, innermost first."""
    if root in done or root == "sd_image_t":
        return
    for f in known[root]:
        inner = f.type.rstrip("*")
        if inner in known:
            reachable(inner, known, done)
    done.append(root)


def params_json(known: dict[str, list[Field]]) -> str:
    order: list[str] = []
    for root in ROOTS:
        reachable(root, known, order)
    # a list's put_list needs its element's put declared first: point of instantiation finds it by the Json argument
    return JSON_HEAD + "\n" + "\n\n".join(writer(n, known[n], known) for n in order) + "\n" + JSON_TAIL


def declarations(cdef: str) -> str | None:
    """The declarations as cffi keeps them, in Python, below the checksum of what they come from; None without cffi."""
    try:
        import cffi
    except ImportError:
        print("generate.py: cffi is not installed here: the package will read cdef.h itself, at every start")
        return None
    builder = cffi.FFI()
    builder.cdef(cdef)
    builder.set_source("_sdsage", None)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "_sdsage.py"
        builder.emit_python_code(str(file))
        return f"# crc32 {zlib.crc32(cdef.encode()):08x}\n{file.read_text(encoding='utf-8')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headers", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cdef = "".join(clean(h.read_text(encoding="utf-8")) for h in args.headers)
    versioned = f"/* ABI {abi_version(args.headers)} */\n{cdef}"
    known = structs(cdef)
    args.out.mkdir(parents=True, exist_ok=True)
    outputs = {
        "cdef.h": versioned,
        "cdef.cffi": declarations(versioned),
        "sdsage_layout.inc": layout(known),
        "params_json.cpp": params_json(known),
        "sdsage.map": version_script(functions(cdef)),
        "sdsage.def": module_definition(functions(cdef)),
    }
    for name, text in outputs.items():
        path = args.out / name
        if text is None:
            path.unlink(missing_ok=True)
        elif (
            not path.is_file() or path.read_text(encoding="utf-8") != text
        ):  # unchanged files keep their time: nothing recompiles
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
