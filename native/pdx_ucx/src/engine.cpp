#include "pdx/ucx/engine.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "pdx/ucx/once.h"
#include "pdx/ucx/status.h"

namespace pdx::ucx {
namespace {

constexpr double kDestructorDeadlineS = 5.0;

}  // namespace

// Outlives the engine while its thread runs.
struct Engine::Shared {
  Once started;
  Once ended;
  std::mutex close_mutex;
  std::atomic<bool> closing{false};
  bool closed = false;
  std::thread thread;
};

Engine::Engine(EngineOptions options)
    : process_(getpid()),
      progress_(std::make_shared<Progress>(std::move(options))),
      shared_(std::make_shared<Shared>()) {
  start_thread();
  try {
    if (!shared_->started.wait(kCallTimeoutS)) {
      throw ResourceError("UCX did not start in time");
    }
    // Fixed before `started` was set.
    send_address_ = progress_->paths().address();
    rkey_ = progress_->rkey();
  } catch (...) {
    progress_->commands().stop();
    if (shared_->ended.wait(1.0)) {
      shared_->thread.join();
    } else {
      shared_->thread.detach();
    }
    throw;
  }
}

Engine::~Engine() {
  if (getpid() != process_) {
    // The thread and UCX's connections belong to the parent: forget them, touch nothing.
    if (shared_->thread.joinable()) {
      new std::shared_ptr<Shared>(shared_);
      new std::shared_ptr<Progress>(progress_);
    }
    return;
  }
  try {
    close(kDestructorDeadlineS);
  } catch (const ResourceError&) {
    // The thread did not end: it keeps everything it uses, this object lets go.
    shared_->thread.detach();
  }
}

void Engine::start_thread() {
  // Signals from outside are for the threads of the program.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) {
    sigdelset(&all, fault);  // these are the thread's own
  }
  pthread_sigmask(SIG_SETMASK, &all, &before);
  shared_->thread = std::thread([progress = progress_, shared = shared_] {
    pthread_setname_np(pthread_self(), "pdx-ucx");
    progress->run([&](const std::exception_ptr& error) { shared->started.set(error); });
    shared->ended.set(nullptr);
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Engine::require_process() const {
  if (getpid() != process_) {
    throw UsageError("this UCX engine was made in process " + std::to_string(process_) +
                     " and cannot be used in its forked child " + std::to_string(getpid()) +
                     "; make a new one after fork");
  }
}

void Engine::require_usable() const {
  require_process();
  if (shared_->closing.load()) {
    throw UsageError("this UCX engine is closed");
  }
}

void Engine::call(std::function<void()> work) {
  const auto done = std::make_shared<Once>();
  const bool taken = progress_->commands().push([work = std::move(work), done] {
    try {
      work();
      done->set(nullptr);
    } catch (...) {
      done->set(std::current_exception());
    }
  });
  if (!taken) {
    throw UsageError("this UCX engine is closed");
  }
  if (!done->wait(kCallTimeoutS)) {
    throw ResourceError("the UCX progress thread did not answer within " +
                        std::to_string(kCallTimeoutS) + " s");
  }
}

int Engine::fileno() const { return progress_->completions().fileno(); }

std::vector<Completion> Engine::drain() {
  require_process();
  return progress_->completions().drain();
}

bool Engine::wait(double timeout_s) const { return progress_->completions().wait(timeout_s); }

RegionInfo Engine::register_region(Range range) {
  require_usable();
  check_range("region", range);
  const auto info = std::make_shared<RegionInfo>();
  call([progress = progress_, info, range] {
    auto region = std::make_shared<Region>(progress->context(), range);
    info->rkey = region->rkey();
    info->id = progress->regions().add(std::move(region));
  });
  return *info;
}

void Engine::deregister_region(std::uint64_t id) {
  require_usable();
  if (!progress_->regions().retire(id)) {
    throw UsageError("region " + std::to_string(id) + " is not registered with this engine");
  }
  // Wakes the thread, which looks for retired regions in every turn.
  progress_->commands().push([] {});
}

std::uint64_t Engine::connect(const std::string& address, double timeout_s) {
  require_usable();
  const LaneAddress parsed = LaneAddress::unpack(address);
  const std::uint64_t path = next_id_++;
  const std::uint64_t deadline = after_ns(timeout_s);
  progress_->commands().open_gate(path);
  progress_->commands().push([progress = progress_.get(), path, parsed, deadline] {
    progress->paths().connect(path, parsed, deadline);
  });
  return path;
}

std::uint64_t Engine::post(std::uint64_t path, std::uint64_t generation, const RunTable& runs,
                           std::span<const std::uint64_t> source,
                           std::vector<RemoteRange> destination) {
  require_usable();
  auto regions = std::make_shared<PostRegions>();
  std::vector<Range> source_ranges;
  for (const std::uint64_t id : source) {
    regions->source.push_back(progress_->regions().find(id));
    source_ranges.push_back(regions->source.back()->range());
  }
  std::vector<Range> destination_ranges;
  for (const RemoteRange& remote : destination) {
    const std::string problem = rkey_problem(rkey_, remote.rkey);
    if (!problem.empty()) {
      throw UsageError("destination region " + std::to_string(destination_ranges.size()) + ": " +
                       problem + "; nothing of this post was sent");
    }
    destination_ranges.push_back(remote.range);
  }
  regions->destination = std::move(destination);
  check_bounds(runs, source_ranges, destination_ranges);
  const std::size_t count = runs.splits.size() - 1;
  const std::uint64_t ticket = next_ticket_.fetch_add(count);
  // std::function wants copies; the command runs once. Nothing of the post is kept here: its remote
  // keys have to end on the progress thread.
  const auto batches = std::make_shared<std::vector<std::unique_ptr<Batch>>>(
      make_batches(runs, std::move(regions), ticket));
  const bool taken = progress_->commands().push_for_path(
      path, [progress = progress_.get(), path, generation, batches] {
        progress->paths().find(path)->post(generation, std::move(*batches));
      });
  if (!taken) {
    throw UsageError("path " + std::to_string(path) + " is closed; nothing of this post was sent");
  }
  return ticket;
}

std::uint64_t Engine::commit(std::uint64_t path, std::uint64_t generation, std::string payload) {
  require_usable();
  const std::uint64_t limit = progress_->options().commit_bytes_max;
  if (payload.size() > limit) {
    throw UsageError("commit: " + std::to_string(payload.size()) + " bytes; the limit is " +
                     std::to_string(limit));
  }
  const std::uint64_t ticket = next_ticket_++;
  const auto kept = std::make_shared<std::string>(std::move(payload));
  const bool taken = progress_->commands().push_for_path(
      path, [progress = progress_.get(), path, generation, ticket, kept] {
        auto commit = std::make_unique<Commit>();
        commit->ticket = ticket;
        commit->payload = std::move(*kept);
        progress->paths().find(path)->commit(generation, std::move(commit));
      });
  if (!taken) {
    throw UsageError("path " + std::to_string(path) + " is closed; the commit was not sent");
  }
  return ticket;
}

void Engine::cancel(std::uint64_t path, std::uint64_t generation, double deadline_s) {
  require_usable();
  const std::uint64_t deadline = deadline_s > 0 ? after_ns(deadline_s) : 0;
  progress_->commands().push_for_path(path,
                                      [progress = progress_.get(), path, generation, deadline] {
                                        progress->paths().find(path)->cancel(generation, deadline);
                                      });
}

void Engine::close_path(std::uint64_t path) {
  require_process();
  progress_->commands().push([progress = progress_.get(), path] {
    if (SendEndpoint* endpoint = progress->paths().find(path)) {
      endpoint->close("closed by the sender", after_ns(kLeaveS));
    }
  });
}

std::pair<std::uint64_t, std::string> Engine::open_receiver() {
  require_usable();
  const std::uint64_t id = next_id_++;
  const auto address = std::make_shared<std::string>();
  call([progress = progress_, id, address] { *address = progress->open_receiver(id); });
  return {id, *address};
}

void Engine::watch_sender(std::uint64_t receiver, const std::string& address) {
  require_usable();
  LaneAddress::unpack(address);  // throws for one that can never come
  progress_->commands().push([progress = progress_.get(), receiver, address] {
    progress->watch_sender(receiver, address);
  });
}

void Engine::close_receiver(std::uint64_t receiver) {
  require_process();
  if (shared_->closing.load()) {
    return;
  }
  call([progress = progress_, receiver] { progress->close_receiver(receiver); });
}

void Engine::close(double deadline_s) {
  require_process();
  const std::lock_guard lock(shared_->close_mutex);
  if (shared_->closed) {
    return;
  }
  shared_->closing.store(true);
  const std::uint64_t drain_deadline = after_ns(deadline_s / 2);
  progress_->commands().push(
      [progress = progress_.get(), drain_deadline] { progress->begin_stop(drain_deadline); });
  if (!shared_->ended.wait(deadline_s)) {
    throw ResourceError("the UCX progress thread did not end within " + std::to_string(deadline_s) +
                        " s; its memory is kept");
  }
  shared_->thread.join();
  shared_->closed = true;
  progress_->commands().stop();
}

}  // namespace pdx::ucx
