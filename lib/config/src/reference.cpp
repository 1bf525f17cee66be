#include <syncbn/config/reference.h>
