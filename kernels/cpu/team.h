// A thread's team, which shares out a loop's parts: whoever is there takes the next one, so that
// nobody waits for a thread that another process keeps from its core.
//
// OpenMP's teams wait in a tight loop: where something else wants one of their cores, the waiting
// thread holds its core for whole slices of time (some 8 ms a loop) while the awaited one queues.
// Here who waits gives its core away every few looks, and a helper sleeps after a while.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

class Team {
 public:
  // Of the calling thread; its helpers end with it.
  static Team& mine() {
    static thread_local Team team;
    return team;
  }

  // How many this thread's loops are for, with itself; 0: as many as OpenMP has in it.
  static int& members() {
    static thread_local int members = 0;
    return members;
  }

  // Whether this thread is at a part of some loop.
  static bool& is_at_work() {
    static thread_local bool is_at_work = false;
    return is_at_work;
  }

  Team() = default;
  Team(const Team&) = delete;

  ~Team() {
    is_over_ = true;
    wake();
    for (std::thread& helper : helpers_) helper.join();
  }

  // Call `work` with parts of [0, count), by `members` threads with this one; what one of them throws
  // is thrown when all have ended.
  template <typename Work>
  void run(int64_t count, int members, const Work& work) {
    while (std::ssize(helpers_) < members - 1)
      helpers_.emplace_back([this, number = std::ssize(helpers_) + 1] { help(number); });
    // Several a member: who comes late finds less left.
    int64_t parts = std::min<int64_t>(count, 8 * members), size = (count + parts - 1) / parts;
    parts = (count + size - 1) / size;
    next_ = NONE;
    call_ = [](const void* given, int64_t begin, int64_t end) {
      (*static_cast<const Work*>(given))(begin, end);
    };
    work_ = &work, count_ = count, size_ = size, parts_ = parts, members_ = members, done_ = 0;
    next_ = ++loops_ << 32;
    wake();
    is_at_work() = true;
    while (take_part()) {}
    is_at_work() = false;
    for (int looks = 0; done_ < parts; ++looks) pause(looks);
    if (has_failed_.exchange(false)) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Call = void (*)(const void*, int64_t, int64_t);
  // A helper looks for more work this long before it sleeps; to wake it may take half as long.
  static constexpr auto AWAKE = std::chrono::milliseconds(1);
  static constexpr int LOOKS = 64;
  // In place of a part's number: there is none left.
  static constexpr uint64_t NONE = 0xffffffff;

  // Every few looks the core goes to who else wants it.
  static void pause(int looks) { looks % LOOKS == LOOKS - 1 ? (void)sched_yield() : _mm_pause(); }

  void wake() {
    ++wakes_;
    wakes_.notify_all();
  }

  bool take_part() {
    uint64_t next = next_;
    int64_t begin, end;
    Call call;
    const void* work;
    do {
      int64_t part = next & NONE;
      if (part >= parts_) return false;
      // Not this loop's, if that is over meanwhile: then `next_` is another, and nothing is taken.
      call = call_, work = work_, begin = part * size_, end = std::min<int64_t>(count_, begin + size_);
    } while (!next_.compare_exchange_weak(next, next + 1));
    try {
      call(work, begin, end);
    } catch (...) {
      if (!has_failed_.exchange(true)) error_ = std::current_exception();
    }
    ++done_;
    return true;
  }

  void help(int64_t number) {
    is_at_work() = true;
    while (!is_over_) {
      uint32_t seen = wakes_;
      while (number < members_ && take_part()) {}
      auto since = Clock::now();
      for (int looks = 0; wakes_ == seen; ++looks) {
        pause(looks);
        if (looks % LOOKS == 0 && Clock::now() - since > AWAKE) wakes_.wait(seen);
      }
    }
  }

  // What a loop is.
  std::atomic<Call> call_{};
  std::atomic<const void*> work_{};
  std::atomic<int64_t> count_{}, size_{}, parts_{}, members_{}, done_{};
  // The loop's number, and the part that is next in it.
  std::atomic<uint64_t> next_{};
  std::atomic<uint32_t> wakes_{};
  std::atomic<bool> is_over_{}, has_failed_{};
  std::exception_ptr error_;
  uint64_t loops_ = 0;
  std::vector<std::thread> helpers_;
};
