// Preloaded by tests: the wall clock is ahead by as many seconds as CLOCK_AHEAD says. The monotonic clock is not.
#include <cstdlib>
#include <ctime>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

extern "C" {

int clock_gettime(clockid_t clock, timespec *out) noexcept {
  long status = syscall(SYS_clock_gettime, clock, out);
  const char *ahead = std::getenv("CLOCK_AHEAD");
  if (status == 0 && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) out->tv_sec += std::atol(ahead);
  return static_cast<int>(status);
}

int gettimeofday(timeval *out, void *) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
}
