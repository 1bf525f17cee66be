#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace syncbn::train {

/// A self-contained page: assets/page.html with styles, `data` and scripts in it.
/// @param script of the page, which shows `data`
std::string page(const std::string& title, const nlohmann::ordered_json& data,
                 std::string_view script);

/// @throws base::UserError if the file exists and is not such a page: it is the user's work
void check_may_replace(const std::filesystem::path& file);

}  // namespace syncbn::train
