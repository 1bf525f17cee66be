/* The channel from workers to their launcher: plain C, no library needed.
 *
 * The launcher gives each worker the writing end of a pipe and names it in the environment:
 *   SYNCBN_AGENT_FD       the descriptor's number
 *   SYNCBN_AGENT_VERSION  the newest record version that the launcher reads
 *   SYNCBN_AGENT_BAR      1: the launcher draws PROGRESS records on a terminal; otherwise a worker
 *                         may log its progress in lines
 *
 * A worker adopts the descriptor (sets close-on-exec and unsets SYNCBN_AGENT_FD, so that its own
 * children do not write to it) and sends records of exactly sizeof(struct syncbn_agent_record)
 * bytes, one write() each: smaller than PIPE_BUF, so records never mix. The descriptor is
 * non-blocking: a record that does not fit is dropped, never waited for. A worker may ignore the
 * channel.
 */
#ifndef SYNCBN_AGENT_H
#define SYNCBN_AGENT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SYNCBN_AGENT_MAGIC 0x4e425953u /* "SYBN" in memory on a little-endian machine */
#define SYNCBN_AGENT_VERSION 1u

enum syncbn_agent_kind {
  SYNCBN_AGENT_HELLO = 1,     /* sent once after adoption; no further fields */
  SYNCBN_AGENT_HEARTBEAT = 2, /* done = steps since the start of the run */
  SYNCBN_AGENT_PROGRESS = 3,  /* done of total, and a line of text to show beside the bar */
  SYNCBN_AGENT_CLEAR = 4,     /* hide the progress bar until the next PROGRESS */
  SYNCBN_AGENT_WAITING = 5, /* the worker has waited for other ranks for a while (say, a second) in
                               collective number `done`, from 1, whose name is `text`. A later
                               PHASE, or a HEARTBEAT or PROGRESS with another `done`, ends the
                               wait */
  SYNCBN_AGENT_PHASE = 6,   /* `text` is what the worker does, such as "evaluation"; the next record
                               may take `done` milliseconds longer than usual */
  SYNCBN_AGENT_TIMEOUT = 7, /* without --hang_timeout, the launcher treats this worker as hanging if
                               it makes no progress for `done` milliseconds; 0: never */
  SYNCBN_AGENT_LOG = 8,   /* `text` is the absolute path of a file of JSON lines. If the job fails,
                             the launcher appends {"event":"end","time":...,"reason":...} with the
                             first failure */
  SYNCBN_AGENT_RESUME = 9 /* `text` is the command that resumes the job; the launcher prints it if
                             the job fails. Do not send a LOG or RESUME whose text does not fit */
};

/* All numbers little-endian, as on every machine this runs on. */
struct syncbn_agent_record {
  uint32_t magic;
  uint16_t version;
  uint16_t kind;     /* enum syncbn_agent_kind */
  int32_t rank;      /* global rank of the sender */
  uint32_t reserved; /* 0 */
  uint64_t time_ns;  /* CLOCK_MONOTONIC of the sender */
  uint64_t done;
  uint64_t total; /* 0: unknown */
  char text[216]; /* UTF-8, ends with NUL */
};

#ifdef __cplusplus
}
static_assert(sizeof(struct syncbn_agent_record) == 256,
              "the record's size is part of the protocol");
#endif

#endif
