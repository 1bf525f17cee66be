#pragma once

#include <string_view>

/// The files of assets/ and of third_party/uplot, which the build writes into assets.cpp.
namespace syncbn::train::assets {

extern const std::string_view kPageHtml;
extern const std::string_view kPageCss;
extern const std::string_view kFormatJs;
extern const std::string_view kCurvesJs;
extern const std::string_view kReportJs;
extern const std::string_view kCompareJs;
extern const std::string_view kUplotJs;
extern const std::string_view kUplotCss;
extern const std::string_view kUplotLicence;

}  // namespace syncbn::train::assets
