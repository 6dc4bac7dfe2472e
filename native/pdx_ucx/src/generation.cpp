#include "pdx/ucx/generation.h"

#include <algorithm>

namespace pdx::ucx {

Batch* Generation::next_unposted() {
  for (const auto& batch : batches) {
    if (batch->unposted()) {
      return batch.get();
    }
  }
  return nullptr;
}

bool Generation::commits_finished() const {
  return std::all_of(commits.begin(), commits.end(),
                     [](const auto& commit) { return commit->finished; });
}

bool Generation::idle() const { return outstanding == 0 && commits_finished() && !cancelling; }

void Generation::sweep() {
  std::erase_if(batches, [](const auto& batch) { return batch->finished; });
  std::erase_if(commits, [](const auto& commit) { return commit->finished; });
}

void Tombstones::add(std::uint64_t generation, const std::string& error) {
  if (!errors_.emplace(generation, error).second) {
    return;
  }
  order_.push_back(generation);
  if (order_.size() > limit_) {
    errors_.erase(order_.front());
    order_.pop_front();
  }
}

const std::string* Tombstones::find(std::uint64_t generation) const {
  const auto at = errors_.find(generation);
  return at == errors_.end() ? nullptr : &at->second;
}

}  // namespace pdx::ucx
