"""Our Philox: the published known answers, and upstream's numbers bit for bit."""

import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

GLUE = ROOT / "native" / "ggml-patched" / "glue"

# counter, key, answer: Random123's kat_vectors, philox4x32 with 10 rounds
KNOWN = """
00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
"""

ANSWERS = """
#include <cstdio>
#include "sdsage_philox.hpp"
int main() {
    uint32_t in[6];
    while (std::scanf("%x %x %x %x %x %x", in, in + 1, in + 2, in + 3, in + 4, in + 5) == 6) {
        const auto w = sdsage::philox4x32_10({ in[0], in[1], in[2], in[3] }, { in[4], in[5] });
        std::printf("%08x %08x %08x %08x\\n", w[0], w[1], w[2], w[3]);
    }
}
"""

# Many seeds, draws of many lengths, seeding again in between: all numbers as they lie in memory.
NUMBERS = """
#include <cstdint>
#include <cstdio>
#include <cmath>
#include <vector>
#include "rng.hpp"
#include HEADER
void put(const std::vector<float> & v) { std::fwrite(v.data(), sizeof(float), v.size(), stdout); }
int main() {
    const uint64_t seeds[] = { 0, 1, 42, 0x7fffffff, 0xffffffff, 0x100000000, 0x123456789abcdef, ~0ull };
    for (uint64_t seed : seeds) {
        PhiloxRNG rng(seed);
        for (uint32_t n : { 1, 2, 5, 64, 100003, 3 }) put(rng.randn(n));
        rng.manual_seed(seed + 1);
        for (int draw = 0; draw < 300; draw++) put(rng.randn(7));
        put(PhiloxRNG(seed).randn(1));
    }
}
"""


def compiled(code: str, folder: Path, *flags: str) -> Path:
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(code)
    subprocess.run(["c++", "-std=c++17", "-O2", *flags, source, "-o", program], check=True)
    return program


def test_known_answers(upstream_tree: Path, tmp_path: Path) -> None:
    program = compiled(ANSWERS, tmp_path, f"-I{GLUE}", f"-I{upstream_tree / 'src'}")
    rows = [line.split() for line in KNOWN.split("\n") if line]
    given = "\n".join(" ".join(row[:6]) for row in rows)
    said = subprocess.run([program], input=given, capture_output=True, text=True, check=True).stdout
    assert [line.split() for line in said.splitlines()] == [row[6:] for row in rows]


def test_the_numbers_are_upstream_s(upstream_tree: Path, tmp_path: Path) -> None:
    made = []
    for header in ("rng_philox.hpp", "sdsage_philox.hpp"):
        folder = tmp_path / header
        folder.mkdir()
        program = compiled(
            NUMBERS, folder, f"-I{GLUE}", f"-I{upstream_tree / 'src'}", f'-DHEADER="{header}"', "-ffp-contract=off"
        )
        made.append(subprocess.run([program], capture_output=True, check=True).stdout)
    assert len(made[0]) == 8 * 4 * (1 + 2 + 5 + 64 + 100003 + 3 + 2100 + 1)
    assert made[0] == made[1]


@pytest.mark.parametrize("folder", ["src", "examples"])
def test_upstream_s_file_is_not_compiled(folder: str, upstream_tree: Path) -> None:
    users = [p.name for p in (upstream_tree / folder).rglob("*.[ch]pp") if '#include "rng_philox.hpp"' in p.read_text()]
    assert users == []
