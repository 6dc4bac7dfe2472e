// One thread waits, with a deadline, for what another one does.
#pragma once
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>

namespace pdx::ucx {

// Something that happens once, with or without an error.
class Once {
 public:
  void set(const std::exception_ptr& error) {
    const std::lock_guard lock(mutex_);
    error_ = error;
    done_ = true;
    changed_.notify_all();
  }

  // False: not within seconds. Throws what `set` was given.
  bool wait(double seconds) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                           [this] { return done_; })) {
      return false;
    }
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

}  // namespace pdx::ucx
