// The kernels' own threads: pinned, asleep between steps, never more than the CPUs allowed.
#pragma once

#include <atomic>
#include <cstdint>

namespace cachewarm {

class Threads {
  public:
    // The caller of `run` is the first of `count` threads. Each is pinned to one of `cpus` if there
    // are as many, the caller while it runs.
    Threads(int count, const int* cpus, int num_cpus);
    ~Threads();
    Threads(const Threads&) = delete;

    int count() const { return count_; }

    // Runs work(self, context) on all threads; returns when all have ended.
    void run(void (*work)(int self, void* context), void* context);

    // Within `work`: returns when all threads have come. Memory written before is seen after.
    void barrier();

    // Within `work`: calls f(unit) once for each unit of 0 … total-1, over all threads, then waits
    // for the others. Each thread begins with a fixed share, so that memory stays near, and takes
    // from the others' when its own is done: a thread that lost its CPU delays nobody for long.
    template <class F>
    void each(int self, int64_t total, F f) {
        for (int i = 0; i < count_; i++) {
            const int victim = (self + i) % count_;
            const int64_t begin = total * victim / count_, end = total * (victim + 1) / count_;
            std::atomic<int64_t>& next = taken_[victim].value;
            if (i && begin + next.load(std::memory_order_relaxed) >= end) continue;
            for (;;) {
                const int64_t unit = begin + next.fetch_add(1, std::memory_order_relaxed);
                if (unit >= end) break;
                f(unit);
            }
        }
        barrier();
    }

  private:
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };

    void serve(int self);
    void pin(int self) const;
    void wait_while(std::atomic<uint32_t>& word, uint32_t value);
    void wake_all(std::atomic<uint32_t>& word);

    // No standard containers: this header is compiled for instruction sets that the rest of the
    // program must not use, and the linker keeps one of several equal inline functions.
    struct Members;
    const int count_;
    Counter* taken_;  // units of each share; clear between two barriers' uses
    Members* members_;
    void (*work_)(int, void*) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint32_t> started_{0};  // counts runs; the last one is the end
    alignas(64) std::atomic<uint32_t> passed_{0};   // counts barriers
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> is_ending_{false};
};

}  // namespace cachewarm
