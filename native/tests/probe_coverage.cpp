// What coverage.h says, for the words on the command line:
//   code ARCHITECTURES CC...        1 or 0 for each compute capability
//   device NAME CC ARCHITECTURES    why no context can be made there
//   ggml BYTES BYTES                why another ggml is none
//   sage GGML CC ARCHITECTURES      what `--sage-attn` gets where the kernels' reason is "REASON"
//   loaded                          what is wrong with the ggml in this process
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "coverage.h"

int main(int argc, char ** argv) {
    const std::vector<std::string> words(argv + 1, argv + argc);
    const auto number = [&](size_t i) { return std::atoi(words.at(i).c_str()); };
    std::string answer;
    if (words.at(0) == "code") {
        for (size_t i = 2; i < words.size(); i++) {
            answer += sdsage::has_code_for(words[1], number(i)) ? '1' : '0';
        }
    } else if (words[0] == "device") {
        answer = sdsage::why_no_code(words.at(1), number(2), words.at(3));
    } else if (words[0] == "ggml") {
        answer = sdsage::why_ggml_differs(static_cast<size_t>(number(1)), static_cast<size_t>(number(2)));
    } else if (words[0] == "sage") {
        sdsage::SageInfo info          = { "cuda:0 (A card)", {}, {}, "REASON" };
        info.device.compute_capability = number(2);
        info.device.architectures      = words.at(3).c_str();
        answer                         = sdsage::sage_problem(info, words.at(1));
    } else if (words[0] == "loaded") {
        answer = sdsage::ggml_problem();
    } else {
        return 2;
    }
    std::printf("%s\n", answer.c_str());
    return 0;
}
