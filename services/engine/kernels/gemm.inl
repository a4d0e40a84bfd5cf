// Y = X · W for every number of rows, over panels (see step.h).
//
// Each output sums over the inputs in one fixed order, whatever the number of rows, the tile it
// falls into or the thread: so it does not depend on what else is computed with it.

// A stretch of inputs: where the panels' weights for it begin. `pairs` of consecutive inputs.
template <int P>
struct Stretch {
    const uint16_t* panels[P];
    int64_t pairs;
};

// R rows x P panels. y[r][32p + c] = scale[r] * y + sum over the stretches; scale null: 1, or 0 when
// `is_first`. x advances over the stretches.
template <int R, int P>
static void tile(const operand* x, int64_t ldx, const Stretch<P>* stretches, int64_t count,
                 const float* scale, bool is_first, float* y, int64_t ldy) {
    vf sums[R][P * kVectors];
    if (is_first) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
            for (int v = 0; v < P * kVectors; v++) sums[r][v] = vf{};
        }
    } else {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const float factor = scale ? scale[r] : 1.0f;
#pragma GCC unroll 16
            for (int v = 0; v < P * kVectors; v++) {
                sums[r][v] = load(y + r * ldy + v * kLanes) * factor;
            }
        }
    }
    for (int64_t s = 0; s < count; s++) {
        const uint16_t* w[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) w[p] = stretches[s].panels[p];
        const int64_t pairs = stretches[s].pairs;
        for (int64_t k = 0; k < pairs; k++) {
#if CW_BF16
            __m512bh words[P * kVectors];
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; v++) {
                    words[p * kVectors + v] =
                        (__m512bh)_mm512_loadu_si512(w[p] + 64 * k + 2 * kLanes * v);
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                int32_t pair;
                __builtin_memcpy(&pair, x + r * ldx + 2 * k, 4);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 16
                for (int v = 0; v < P * kVectors; v++) {
                    sums[r][v] = (vf)_mm512_dpbf16_ps((__m512)sums[r][v], both, words[v]);
                }
            }
#else
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
#pragma GCC unroll 16
                for (int v = 0; v < kVectors; v++) {
                    const vu word = load_words(w[p] + 64 * k + 2 * kLanes * v);
                    const vf first = (vf)(word << 16), second = (vf)(word & 0xffff0000u);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) {
                        vf& sum = sums[r][p * kVectors + v];
                        sum += first * x[r * ldx + 2 * k];
                        sum += second * x[r * ldx + 2 * k + 1];
                    }
                }
            }
#endif
        }
        x += 2 * pairs;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < P * kVectors; v++) store(y + r * ldy + v * kLanes, sums[r][v]);
    }
}

// How many panels at once keep the registers full: few rows alone leave the sums waiting for
// themselves.
constexpr int panels_at_once(int rows) {
    const int fitting = CW_ROWS / rows;
    return fitting >= 4 ? 4 : fitting >= 2 ? 2 : 1;
}

constexpr int panels_taken(int at_once, int64_t left) {
    return at_once >= 4 && left >= 4 ? 4 : at_once >= 2 && left >= 2 ? 2 : 1;
}

template <int P>
using Tile = void (*)(const operand*, int64_t, const Stretch<P>*, int64_t, const float*, bool,
                      float*, int64_t);

template <int P>
struct Tiles {
    Tile<P> of_rows[CW_ROWS + 1] = {};
    constexpr Tiles() { fill<1>(); }
    template <int R>
    constexpr void fill() {
        if constexpr (R * P <= CW_ROWS) {
            of_rows[R] = &tile<R, P>;
            fill<R + 1>();
        }
    }
};
template <int P>
constexpr Tiles<P> kTiles;

// Rows of tile i when `rows` are dealt out evenly over the fewest tiles.
struct Tiling {
    int64_t count, rows;
    explicit Tiling(int64_t rows_) : count((rows_ + CW_ROWS - 1) / CW_ROWS), rows(rows_) {}
    int64_t begin(int64_t i) const { return rows * i / count; }
    int largest() const { return static_cast<int>((rows + count - 1) / count); }
    int size(int64_t i) const { return static_cast<int>(begin(i + 1) - begin(i)); }
};

// P panels from the list, for all tiles of rows.
template <int P>
static void some_panels(int size, const operand* x, int64_t ldx, const uint16_t* const* panels,
                        int64_t offset, int64_t pairs, bool is_first, float* y, int64_t ldy) {
    Stretch<P> stretch;
    for (int p = 0; p < P; p++) stretch.panels[p] = panels[p] + offset;
    stretch.pairs = pairs;
    kTiles<P>.of_rows[size](x, ldx, &stretch, 1, nullptr, is_first, y, ldy);
}

constexpr int64_t kRowBlock = 96;     // rows whose sums stay in the L1/L2 cache
constexpr int64_t kInputBlock = 768;  // inputs at once: a panel's share stays near the L1 cache

// y [rows <= kRowBlock, 32 * num_panels] = x · the panels, each of `columns` inputs.
static void multiply_block(const operand* x, int64_t ldx, int64_t rows,
                           const uint16_t* const* panels, int64_t num_panels, int64_t columns,
                           float* y, int64_t ldy) {
    const Tiling tiling(rows);
    for (int64_t k = 0; k < columns; k += kInputBlock) {
        const int64_t inputs = columns - k < kInputBlock ? columns - k : kInputBlock;
        for (int64_t p = 0; p < num_panels;) {
            const int at_once = panels_at_once(tiling.largest());
            const int taken = panels_taken(at_once, num_panels - p);
            for (int64_t i = 0; i < tiling.count; i++) {
                const int64_t r = tiling.begin(i);
                const auto run = taken == 4 ? some_panels<4> : taken == 2 ? some_panels<2>
                                                                          : some_panels<1>;
                run(tiling.size(i), x + r * ldx + k, ldx, panels + p, k * kPanel, inputs / 2,
                    k == 0, y + r * ldy + p * kPanel, ldy);
            }
            p += taken;
        }
    }
}
