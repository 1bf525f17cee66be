#pragma once

#include <string>
#include <vector>

#include "job/flight_file.h"

namespace syncbn::launch {

/// Says in words which ranks did not come to which calls, and what is missing of the files.
/// @param files of the nodes of one job; not empty.
std::string explanation(const std::vector<FlightFile>& files);

/// `syncbn-launch explain [--save=FILE] [--torch=FOLDER] FILE...`: prints the explanation, and
/// writes the records to one file, and to one of each rank for torch's fr_trace. In place of the
/// files, the process of a launcher of this machine stands for the workers of all nodes as they are
/// now.
/// @throws base::UserError if a file is none of syncbn-launch, or files are of different jobs.
void explain(const std::vector<std::string>& arguments);

}  // namespace syncbn::launch
