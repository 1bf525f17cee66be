#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace syncbn::train {

/// A page that loads nothing from anywhere: assets/page.html with styles, `data` and scripts in it.
/// @param script of the page, which shows `data`
std::string page(const std::string& title, const nlohmann::ordered_json& data,
                 std::string_view script);

/// @throws base::UserError if the file is there and is no such page: it is someone's work.
void check_may_replace(const std::filesystem::path& file);

}  // namespace syncbn::train
