#pragma once

// A configuration has layers: files, the files that they are based on, and the command line.

#include <filesystem>
#include <functional>
#include <vector>

#include <syncbn/config/field_info.h>
#include <syncbn/config/value.h>
#include <syncbn/config/yaml.h>

namespace syncbn::config {

/// Writes `over` over `under`. Merges sections key by key; replaces anything else. A section whose
/// `type` changes loses its other keys. A key that is a number names an item of a list. Adds a
/// fault for an item that the list lacks.
void merge(const Value& over, Value& under, Faults& faults);

/// Reads configuration files and merges them, later ones over earlier ones. A file may be based on
/// others, which it names relative to itself: `base: a.yaml` or `base: [a.yaml, b.yaml]`. These are
/// merged in this order, and then the file over them.
/// @throws base::UserError as load_yaml() does, for a file that is based on itself, and for more
///   than 100 base files; the message names the chain of files.
/// @param load reads one file
Value load_files(const std::vector<std::filesystem::path>& files, Faults& faults,
                 const std::function<Value(const std::filesystem::path&)>& load = load_yaml);

/// Replaces the references in all values:
///   ${optimizer.lr}  the value of another key, or its default in `fields`
///   ${env:DATA}      an environment variable
///   ${here}          the folder of the file that contains the reference
///   ${NAME:-TEXT}    one of these, or TEXT if it is not set
///   $${              a literal ${
/// A value that consists of one reference gets the kind of the value it refers to, such as a list.
/// A leading `~/` becomes the home folder. Adds a fault for each reference that has no value or
/// refers to itself.
void resolve_references(Value& config, const std::vector<FieldInfo>& fields, Faults& faults);

/// Escapes `${` in all texts so that resolve_references() restores them. Does not escape `~/`.
void escape_references(Value& config);

}  // namespace syncbn::config
