#include <syncbn/config/command_line.h>
