// File names are UTF-8 in our API and in upstream's. Windows opens a narrow name in the code page of the program, which is
// UTF-8 in a program that asks for it (sd-cli does, Python does not), and GCC's std::filesystem there takes its bytes for
// letters: for the system a name has to become a wide one. Elsewhere a name stays the string that it is.
#pragma once

#include <string>

#ifdef _WIN32
#include <filesystem>
#endif

namespace sdsage {

#ifdef _WIN32
inline std::filesystem::path file_name(const std::string & utf8) { return std::filesystem::u8path(utf8); }
#else
inline const std::string & file_name(const std::string & utf8) { return utf8; }
#endif

}  // namespace sdsage
