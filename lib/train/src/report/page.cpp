#include "report/page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/error.h>

#include <fstream>
#include <system_error>

#include "records/log_record.h"
#include "report/assets.h"

namespace syncbn::train {
namespace {

std::string escaped(const std::string& text) {
  std::string html;
  for (const char c : text) {
    html += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
  }
  return html;
}

/// JSON for a <script> element: nothing in it ends the element or begins a comment.
std::string script_json(const nlohmann::ordered_json& data) {
  using Json = nlohmann::ordered_json;
  std::string text;
  for (const char c : data.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace)) {
    text += c == '<' ? "\\u003c" : std::string(1, c);
  }
  return text;
}

void replace(std::string& text, std::string_view mark, std::string_view by) {
  const size_t place = text.find(mark);
  if (place == std::string::npos) {
    throw base::InternalError(fmt::format("page.html has no {}", mark));
  }
  text.replace(place, mark.size(), by);
}

}  // namespace

std::string page(const std::string& title, const nlohmann::ordered_json& data,
                 std::string_view script) {
  std::string html(assets::kPageHtml);
  // From the end to the beginning, so that the inserted text is not searched for marks.
  replace(html, "{{script}}", script);
  replace(html, "{{common}}", fmt::format("{}\n{}\n", assets::kFormatJs, assets::kCurvesJs));
  replace(html, "{{shares}}", fmt::format("{}", fmt::join(kShareWords, "|")));
  replace(html, "{{uplot}}", assets::kUplotJs);
  replace(html, "{{data}}", script_json(data));
  replace(html, "{{licence}}", assets::kUplotLicence);
  replace(html, "{{style}}", fmt::format("{}\n{}", assets::kUplotCss, assets::kPageCss));
  replace(html, "{{title}}", escaped(title));
  return html;
}

void check_may_replace(const std::filesystem::path& file) {
  constexpr size_t kMaxHead = 1024;  // bytes
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(file, ignored)) return;
  std::string head(kMaxHead, '\0');
  std::ifstream(file).read(head.data(), kMaxHead);
  if (head.find(R"(<meta name="generator" content="syncbn train">)") != head.npos) return;
  throw base::UserError(fmt::format(
      "{} is there already, and no page of train; name another file, or remove it", file.string()));
}

}  // namespace syncbn::train
