// Causal attention over KV blocks, in place. Scores and weighted sums are the packed GEMM again.
//
// A row is one query head at one token. Its keys are taken in *splits* of kSplit tokens at fixed
// absolute positions, each with a softmax of its own over tiles of kTile, and the splits are merged
// in order. So a row's result depends neither on the rows beside it, nor on where chunks begin, nor
// on how splits were dealt out to threads.

constexpr int kTile = 128;
constexpr int kSplit = 512;
constexpr int kGroups = kSplit / kPanel;  // of 32 tokens in a split

// One KV head's keys and values of one layer over a split: a pointer for each 32 tokens.
struct Keys {
    const uint16_t* k[kGroups];
    const uint16_t* v[kGroups];
    int64_t v_stride;  // between panels of V
};

static Keys keys_of(const Model& model, const Chunk& chunk, int64_t layer, int64_t kv_head,
                    int64_t split, int64_t num_tokens) {
    Keys keys;
    const int64_t part = model.kv_part(), block_size = model.block_size;
    const int64_t base = (layer * model.num_kv_heads + kv_head) * 2 * part;
    keys.v_stride = block_size * kPanel;
    for (int64_t g = 0; g * kPanel < num_tokens; g++) {
        const int64_t position = split * kSplit + g * kPanel;
        const uint16_t* block =
            reinterpret_cast<const uint16_t*>(chunk.blocks[position / block_size]) + base;
        const int64_t inside = position % block_size;
        keys.k[g] = block + inside * model.padded_head();
        keys.v[g] = block + part + inside * kPanel;
    }
    return keys;
}

// The running softmax of a row: sum of exp2(score - most) and the weighted values, o [D].
struct Softmax {
    float most, sum;
};

constexpr float kNothing = -__builtin_inff();

// o [rows, 32 P] = (o · rescale, or 0 without it) + weights · V, of the tile that begins with group
// `first` and has `count` tokens. No token behind them is read but the second of a last pair.
template <int P>
static void weigh(int rows, const operand* weights, const Keys& keys, int first, int count,
                  int64_t panel, const float* rescale, float* o, int64_t ldo) {
    Stretch<P> stretches[kTile / kPanel];
    int num_stretches = 0;
    for (int token = 0; token < count; token += kPanel) {
        Stretch<P>& stretch = stretches[num_stretches];
        for (int p = 0; p < P; p++) {
            stretch.panels[p] = keys.v[first + num_stretches] + (panel + p) * keys.v_stride;
        }
        stretch.pairs = ((count - token < kPanel ? count - token : kPanel) + 1) / 2;
        num_stretches++;
    }
    kTiles<P>.of_rows[rows](weights, kTile, stretches, num_stretches, rescale, !rescale, o, ldo);
}

// From the scores of `width` tokens, of which `seen` are there for this row, to their weights, and on
// with the running softmax. Returns what earlier values have to be multiplied with.
template <bool kIsFull>
static float weigh_scores(const float* scores, int width, int seen, float scale, operand* weights,
                          Softmax& state) {
    const vi limit = vi{} + seen;
    vf most = splat(kNothing);
    vi lanes = lane_numbers();
    if (kIsFull) width = kTile;
#pragma GCC unroll 4
    for (int c = 0; c < width; c += kLanes, lanes += kLanes) {
        const vf score = load(scores + c);
        most = greater_of(most, kIsFull ? score : select(lanes < limit, score, splat(kNothing)));
    }
    const float tile_most = max_of(most) * scale;
    const float before = state.most, now = tile_most > before ? tile_most : before;
    vf sum = vf{};
    lanes = lane_numbers();
#pragma GCC unroll 4
    for (int c = 0; c < width; c += kLanes, lanes += kLanes) {
        vf weight = exp2_of(load(scores + c) * scale - now);
        if (!kIsFull) weight = select(lanes < limit, weight, vf{});  // whatever stood there
        sum += weight;
        store_operand(weights + c, weight);
    }
    const float rescale = exp2_of(before - now);
    state = {now, state.sum * rescale + sum_of(sum)};
    return rescale;
}

// Rows of one tile of the GEMM against one split. limits[r] >= 1: keys that row r sees.
// Writes o [rows, ldo] and the softmax of each row.
static void attend_rows(const operand* q, int64_t ldq, int rows, const int* limits,
                        const Keys& keys, int64_t head_dim, float scale, float* o, int64_t ldo,
                        Softmax* softmax) {
    alignas(64) float scores[CW_ROWS * kTile];
    alignas(64) operand weights[CW_ROWS * kTile];
    float rescale[CW_ROWS];
    int longest = 0;
    for (int r = 0; r < rows; r++) longest = limits[r] > longest ? limits[r] : longest;
    const int at_once = panels_at_once(rows);
    for (int begin = 0; begin < longest; begin += kTile) {
        const int count = longest - begin < kTile ? longest - begin : kTile;
        const int groups = (count + kPanel - 1) / kPanel, first = begin / kPanel;
        for (int g = 0; g < groups;) {
            const int taken = panels_taken(at_once, groups - g);
            const auto run = taken == 4   ? some_panels<4>
                             : taken == 2 ? some_panels<2>
                                          : some_panels<1>;
            run(rows, q, ldq, keys.k + first + g, 0, head_dim / 2, true, scores + g * kPanel,
                kTile);
            g += taken;
        }
        for (int r = 0; r < rows; r++) {
            const int seen = limits[r] - begin;
            float* row = scores + r * kTile;
            operand* weight = weights + r * kTile;
            Softmax& state = softmax[r];
            if (!begin) state = {kNothing, 0};
            rescale[r] = seen >= kTile
                             ? weigh_scores<true>(row, kTile, kTile, scale, weight, state)
                             : weigh_scores<false>(row, groups * kPanel, seen, scale, weight, state);
        }
        for (int64_t d = 0; d < head_dim / kPanel;) {
            const int taken = panels_taken(at_once, head_dim / kPanel - d);
            const auto run = taken == 4 ? weigh<4> : taken == 2 ? weigh<2> : weigh<1>;
            run(rows, weights, keys, first, count, d, begin ? rescale : nullptr, o + d * kPanel,
                ldo);
            d += taken;
        }
    }
}

// Adds a split's result to what earlier splits gave; acc [D] starts at 0 with {kNothing, 0}.
static void merge(float* acc, Softmax& total, const float* o, Softmax split, int64_t head_dim) {
    const float now = split.most > total.most ? split.most : total.most;
    const float old_share = exp2_of(total.most - now), new_share = exp2_of(split.most - now);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        store(acc + d, load(acc + d) * old_share + load(o + d) * new_share);
    }
    total.sum = total.sum * old_share + split.sum * new_share;
    total.most = now;
}

static void finish(const float* acc, Softmax total, operand* x, int64_t head_dim) {
    const float share = 1.0f / total.sum;
    for (int64_t d = 0; d < head_dim; d += kLanes) store_operand(x + d, load(acc + d) * share);
}
