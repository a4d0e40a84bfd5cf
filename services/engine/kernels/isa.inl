// The kernels of one instruction set: define CW_ISA (the name of its table), CW_NAME, CW_BYTES,
// CW_BF16 and CW_ROWS, then include this. Everything is local to the including file: code made for
// one instruction set must not be what the linker keeps for another.

#include <cstdlib>
#include <cstring>
#include <ctime>

#if CW_BF16
#include <immintrin.h>
#endif

#include "step.h"
#include "threads.h"

namespace cachewarm {
namespace {

#include "vector.inl"

#include "gemm.inl"

#include "attention.inl"

#include "step.inl"

Workspace* make_workspace() { return reinterpret_cast<Workspace*>(new Memory); }

void drop_workspace(Workspace* workspace) { delete reinterpret_cast<Memory*>(workspace); }

void run(const Model& model, const Step& step, Workspace& workspace, Threads& threads,
         double* seconds) {
    Run all(model, step, reinterpret_cast<Memory&>(workspace), threads, seconds);
    all.prepare();
    threads.run([](int self, void* context) { static_cast<Run*>(context)->work(self); }, &all);
}

struct Product {
    const operand* x;
    int64_t ldx, rows;
    const Matrix& w;
    float* y;
    Threads& threads;
    int64_t repeats;

    void work(int self) {
        const int64_t size = unit_panels(w.num_panels, threads.count());
        const int64_t ldy = w.num_panels * kPanel;
        for (int64_t i = 0; i < repeats; i++) {
            threads.each(self, (w.num_panels + size - 1) / size, [&](int64_t unit) {
                const int64_t first = unit * size, left = w.num_panels - first;
                const int64_t count = left < size ? left : size;
                const uint16_t* panels[kUnitPanels];
                for (int64_t p = 0; p < count; p++) panels[p] = w.panel(first + p);
                for (int64_t r = 0; r < rows; r += kRowBlock) {
                    const int64_t num = rows - r < kRowBlock ? rows - r : kRowBlock;
                    multiply_block(x + r * ldx, ldx, num, panels, count, w.columns,
                                   y + r * ldy + first * kPanel, ldy);
                }
            });
        }
    }
};

void multiply(const float* x, int64_t rows, const Matrix& w, float* y, Threads& threads,
              int64_t repeats) {
    Buffer<operand> buffer;
    const int64_t ldx = w.columns + kGap;
    operand* rounded = buffer.at_least(rows * ldx);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t k = 0; k < w.columns; k += kLanes) {
            store_operand(rounded + r * ldx + k, load(x + r * w.columns + k));
        }
    }
    Product product{rounded, ldx, rows, w, y, threads, repeats};
    threads.run([](int self, void* context) { static_cast<Product*>(context)->work(self); },
                &product);
}

}  // namespace

const Isa CW_ISA = {CW_NAME, make_workspace, drop_workspace, run, multiply};

}  // namespace cachewarm
