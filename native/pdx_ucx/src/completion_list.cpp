#include "pdx/ucx/completion_list.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "pdx/ucx/status.h"

namespace pdx::ucx {

CompletionList::CompletionList() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0) {
    throw ResourceError("eventfd for completions: no descriptor left; raise RLIMIT_NOFILE");
  }
}

CompletionList::~CompletionList() { ::close(fd_); }

void CompletionList::push(Completion completion) {
  const std::lock_guard lock(mutex_);
  list_.push_back(std::move(completion));
  if (list_.size() == 1) {
    const std::uint64_t one = 1;
    // Cannot fail: the counter is 0 or 1.
    [[maybe_unused]] const auto written = ::write(fd_, &one, sizeof one);
  }
}

std::vector<Completion> CompletionList::drain() {
  std::vector<Completion> taken;
  const std::lock_guard lock(mutex_);
  if (!list_.empty()) {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(fd_, &count, sizeof count);
    taken.swap(list_);
  }
  return taken;
}

bool CompletionList::wait(double timeout_s) const {
  pollfd entry{fd_, POLLIN, 0};
  const double ms = std::clamp(timeout_s * 1000.0, 0.0, 1e9);
  return ::poll(&entry, 1, static_cast<int>(ms)) > 0;
}

}  // namespace pdx::ucx
