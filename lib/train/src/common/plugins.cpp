#include "common/plugins.h"

#include <dlfcn.h>
#include <elf.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/sha256.h>
#include <syncbn/base/text.h>
#include <syncbn/train/plugin.h>

#include <cstring>
#include <exception>
#include <filesystem>
#include <optional>
#include <string_view>

#include "common/kinds.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxBytes = size_t{2} << 30;  // debug information takes hundreds of MB

std::vector<Plugin>& plugins() {
  static std::vector<Plugin> all;
  return all;
}

/// The parts of SYNCBN_PLUGIN_ABI, such as "libtorch 2.11".
std::vector<std::string> abi_parts(std::string_view text) {
  std::vector<std::string> parts;
  for (size_t end = 0; (end = text.find('|')) != text.npos; text.remove_prefix(end + 1)) {
    parts.emplace_back(text.substr(0, end));
  }
  return parts;
}

/// What SYNCBN_PLUGIN wrote to a library; empty if it is no plug-in.
std::vector<std::string> abi_of(std::string_view library) {
  // In two pieces, so that this program does not look like a plug-in.
  const std::string mark = std::string("syncbn-plugin") + '|';
  const size_t begin = library.find(mark);
  if (begin == library.npos) return {};
  const std::string_view rest = library.substr(begin + mark.size());
  return abi_parts(rest.substr(0, rest.find('\0')));
}

/// Item `index` of a table at `offset` of a file; nothing if the file ends before it.
template <class Item>
std::optional<Item> item_of(std::string_view file, uint64_t offset, uint64_t index = 0) {
  Item item{};
  if (offset > file.size() || (file.size() - offset) / sizeof item <= index) return std::nullopt;
  std::memcpy(&item, file.data() + offset + index * sizeof item, sizeof item);
  return item;
}

/// Whether the end of a library is missing or all zeros, as after an aborted copy: the dynamic
/// loader would crash. Linkers write the table of sections last; `sstrip` removes it.
bool is_damaged(std::string_view library) {
  // The loader itself refuses anything but a 64-bit library.
  if (!library.starts_with(ELFMAG "\x02")) return false;
  const auto header = item_of<Elf64_Ehdr>(library, 0);
  if (!header) return true;
  if (header->e_shstrndx < header->e_shnum) {
    const auto last = item_of<Elf64_Shdr>(library, header->e_shoff, header->e_shnum - 1U);
    const auto names = item_of<Elf64_Shdr>(library, header->e_shoff, header->e_shstrndx);
    if (!last || !names || names->sh_type != SHT_STRTAB) return true;
  }
  for (unsigned i = 0; i < header->e_phnum; ++i) {
    const auto part = item_of<Elf64_Phdr>(library, header->e_phoff, i);
    if (!part || part->p_offset > library.size()) return true;
    if (part->p_type == PT_LOAD && part->p_filesz > library.size() - part->p_offset) return true;
    if (part->p_type != PT_DYNAMIC) continue;
    const auto first = item_of<Elf64_Dyn>(library, part->p_offset);
    if (!first || first->d_tag == DT_NULL) return true;
  }
  return false;
}

void check_abi(const std::string& file, const std::vector<std::string>& built_for) {
  const std::vector<std::string> own = abi_parts(SYNCBN_PLUGIN_ABI);
  std::vector<std::string> theirs;
  std::vector<std::string> ours;
  for (size_t i = 0; i < own.size(); ++i) {
    const std::string other = i < built_for.size() ? built_for[i] : "nothing known";
    if (other == own[i]) continue;
    theirs.push_back(base::printable(other));
    ours.push_back(own[i]);
  }
  if (ours.empty()) return;
  throw base::UserError(
      fmt::format("{} was built for {}, and this program has {}; build it again against the "
                  "installation of this program (docs/extending.md)",
                  file, base::join(theirs, ", "), base::join(ours, ", ")));
}

/// A plug-in's own message, made printable and limited in length.
std::string shown(const std::exception& error) {
  constexpr size_t kMaxMessage = 1000;
  const std::string text = base::printable(error.what(), "\n");
  return text.empty() ? "an exception without a message"
                      : std::string(base::utf8_prefix(text, kMaxMessage));
}

void load(const fs::path& path) {
  const std::string file = path.filename();
  std::error_code ignored;
  if (base::exists(path) && !fs::is_regular_file(path, ignored)) {
    throw base::UserError(fmt::format("{} is no file; name a shared library (.so)", path.string()));
  }
  const std::string bytes = base::read_file(path, kMaxBytes);
  if (is_damaged(bytes)) {
    throw base::UserError(
        fmt::format("{} is cut off or damaged; copy or build it again", path.string()));
  }
  const std::vector<std::string> built_for = abi_of(bytes);
  if (built_for.empty()) {
    throw base::UserError(fmt::format(
        "{} is no plug-in: it has no SYNCBN_PLUGIN(...) (docs/extending.md)", path.string()));
  }
  check_abi(path, built_for);
  register_from(file, [&] {
    void* const library = ::dlopen(path.c_str(), RTLD_NOW);
    if (library == nullptr) throw base::UserError(::dlerror());
    const auto register_all =
        reinterpret_cast<void (*)()>(::dlsym(library, "syncbn_register_plugin"));
    if (register_all == nullptr) throw base::UserError(::dlerror());
    register_all();
  });
  plugins().push_back({.file = file, .sha256 = base::to_hex(base::sha256(bytes))});
}

}  // namespace

const std::vector<Plugin>& loaded_plugins() {
  return plugins();
}

void register_from(const std::string& origin, const std::function<void()>& register_all) {
  // Entries without an origin are the program's own.
  for (const Kind& kind : all_kinds()) kind.registry().set_origin("");
  const std::string failed =
      origin.empty() ? "cannot register what this program has" : "cannot load " + origin;
  try {
    register_all();
  } catch (const std::exception& error) {
    throw base::UserError(fmt::format("{}: {}", failed, shown(error)));
  } catch (...) {
    throw base::UserError(
        fmt::format("{}: it threw an exception that does not derive from std::exception", failed));
  }
  for (const Kind& kind : all_kinds()) kind.registry().set_origin(origin);
}

void load_plugins(const config::Value& wanted) {
  config::Faults faults;
  if (wanted.kind == config::Value::Kind::kScalar && !wanted.is_unresolved) {
    faults.add(wanted.mark,
               fmt::format("plugins: expected a list, as [{}]", base::printable(wanted.scalar)));
  }
  for (const config::Value& one : wanted.list) {
    if (one.kind != config::Value::Kind::kScalar || one.is_unresolved) continue;
    try {
      if (one.scalar.empty()) throw base::UserError("a name is empty; name a library");
      load(fs::absolute(one.scalar).lexically_normal());
    } catch (const base::UserError& error) {
      faults.add(one.mark, fmt::format("plugins: {}", error.what()));
    }
  }
  faults.throw_if_any();
}

}  // namespace syncbn::train
