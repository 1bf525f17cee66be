#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace syncbn::train {

/// A page about a run, from the files in its folder: curves, results by class, pictures,
/// configuration, environment. Below 3 MB: it thins out the curves, and selects and shrinks the
/// pictures. The run may still be training.
/// @throws base::UserError for a folder that holds no run, or the run of a newer version
std::string report_page(const std::filesystem::path& folder);

/// Writes report_page() to RUN/report.html.
/// @return its path
/// @throws as report_page(), and base::UnavailableError if the disk is full
std::filesystem::path write_report(const std::filesystem::path& folder);

/// `train report RUN...`. @param args without "report"
int report_command(const std::vector<std::string>& args);

/// `train compare RUN... [--html FILE]`: prints a table of runs of one task, best first, with the
/// keys in which they differ. Runs that differ only in their seeds share a row, with mean and
/// standard deviation. With --html, also writes a page with their curves.
/// @param args without "compare"
/// @throws base::UserError for runs of different tasks and for a folder that is given twice, and as
///   report_page()
int compare_command(const std::vector<std::string>& args);

}  // namespace syncbn::train
