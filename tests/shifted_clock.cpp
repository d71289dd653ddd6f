// Preloaded by tests: the wall clock is ahead by as many seconds as CLOCK_AHEAD says. The monotonic clock is not.
#include <cstdlib>
#include <ctime>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

// Read once, before there are threads: getenv crashes while another thread sets a variable.
static long ahead = 0;
__attribute__((constructor)) static void read_ahead() {
  const char *text = std::getenv("CLOCK_AHEAD");
  ahead = text ? std::atol(text) : 0;
}

extern "C" {

int clock_gettime(clockid_t clock, timespec *out) noexcept {
  long status = syscall(SYS_clock_gettime, clock, out);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) out->tv_sec += ahead;
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
