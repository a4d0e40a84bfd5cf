#include "threads.h"

#include <climits>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <linux/futex.h>

namespace cachewarm {

namespace {

// About 20 µs: longer than the parts of a layer differ, shorter than a slice of the scheduler.
constexpr int kSpins = 600;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

}  // namespace

struct Threads::Members {
    std::vector<int> cpus;
    std::vector<std::thread> threads;
};

Threads::Threads(int count, const int* cpus, int num_cpus)
    : count_(count), taken_(new Counter[count]), members_(new Members) {
    members_->cpus.assign(cpus, cpus + num_cpus);
    for (int self = 1; self < count_; self++) {
        members_->threads.emplace_back([this, self] { serve(self); });
    }
}

Threads::~Threads() {
    is_ending_ = true;
    started_.fetch_add(1);
    wake_all(started_);
    for (std::thread& thread : members_->threads) thread.join();
    delete members_;
    delete[] taken_;
}

void Threads::pin(int self) const {
    if (static_cast<int>(members_->cpus.size()) != count_) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(members_->cpus[self], &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a refusal costs speed only
}

void Threads::run(void (*work)(int, void*), void* context) {
    // A helper on this thread's CPU would wait for it: the scheduler moves neither for milliseconds.
    // Afterwards the caller may run where it could before, and so may what it starts.
    cpu_set_t before;
    const bool is_known = pthread_getaffinity_np(pthread_self(), sizeof before, &before) == 0;
    if (is_known) pin(0);
    work_ = work;
    context_ = context;
    if (count_ > 1) {
        started_.fetch_add(1, std::memory_order_release);
        wake_all(started_);
    }
    work(0, context);
    barrier();
    if (is_known) pthread_setaffinity_np(pthread_self(), sizeof before, &before);
}

void Threads::serve(int self) {
    pthread_setname_np(pthread_self(), "kernel");
    pin(self);
    for (uint32_t seen = 0;; seen++) {
        wait_while(started_, seen);
        if (is_ending_) return;
        work_(self, context_);
        barrier();
    }
}

void Threads::barrier() {
    const uint32_t passed = passed_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < count_) {
        wait_while(passed_, passed);
        return;
    }
    arrived_.store(0, std::memory_order_relaxed);
    // Nobody takes units now: all have come.
    for (int i = 0; i < count_; i++) taken_[i].value.store(0, std::memory_order_relaxed);
    passed_.fetch_add(1, std::memory_order_acq_rel);
    wake_all(passed_);
}

void Threads::wait_while(std::atomic<uint32_t>& word, uint32_t value) {
    for (int i = 0; i < kSpins; i++) {
        if (word.load(std::memory_order_acquire) != value) return;
        relax();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (word.load(std::memory_order_seq_cst) == value) {
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Threads::wake_all(std::atomic<uint32_t>& word) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace cachewarm
