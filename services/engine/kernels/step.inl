// One step: all rows of all chunks through all layers. Included by one file for each instruction
// set, within a namespace of its own.

// Memory that only grows, on cache-line borders. (No std::vector: see Threads.)
template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    ~Buffer() { free(memory_); }
    T* at_least(int64_t count) {
        if (count > size_) {
            free(memory_);
            memory_ = nullptr;
            size_ = 0;
            const size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
            memory_ = static_cast<T*>(aligned_alloc(4096, bytes));
            if (!memory_) abort();  // as operator new would end it: nothing above can go on
            memset(static_cast<void*>(memory_), 0, bytes);
            size_ = count;
        }
        return memory_;
    }

  private:
    T* memory_ = nullptr;
    int64_t size_ = 0;
};

constexpr int64_t kFewRows = 4;      // each thread computes a GEMM's input for itself
constexpr int64_t kBandRows = 96;    // rows of a prefill that go over the keys together
constexpr int kUnitPanels = 4;
constexpr int kMaxBandRows = kBandRows > kMaxGroup ? kBandRows : kMaxGroup;
constexpr int kMaxHeadPanels = kMaxHead / kPanel;
constexpr int64_t kGap = 32;         // between rows of an operand: no power of two

struct Row {
    int64_t position;
    uint16_t* block;  // of its own KV
    int64_t inside;   // place in that block
    int64_t chunk;
    bool is_written;
};

// A run of a chunk's tokens that attend together, or rows of several chunks at one split.
struct Band {
    int64_t chunk, first_token, num_tokens;
};
struct Member {
    int64_t row, out;  // of q; of the result
    int limit;
};
struct Stack {
    int64_t split, first_member, num_members;
};

struct AttentionPlan {
    Buffer<Band> bands_buffer;
    Buffer<Stack> stacks_buffer;
    Buffer<Member> members_buffer;
    Buffer<int64_t> bases_buffer, stacked_buffer;
    Band* bands;
    Stack* stacks;
    Member* members;
    int64_t* partial_base;  // [out]: where the splits of a stacked row begin
    int64_t* stacked;       // the outs that have to be merged
    int64_t num_bands, num_stacks, num_members, num_stacked, num_partials;
};

struct Memory {
    Buffer<Row> rows;
    Buffer<float> turns;  // [row][cos of head_dim / 2, sin of head_dim / 2]
    Buffer<float> hidden, kept_hidden;
    Buffer<int64_t> kept;
    Buffer<operand> x, q, mixed, gated;
    Buffer<float> partial_values;
    Buffer<Softmax> partials;
    AttentionPlan plan, last_plan;
    Buffer<float> sums;         // of each thread
    Buffer<operand> own_x;      // of each thread, for few rows
};

inline int64_t num_splits(int64_t position) { return position / kSplit + 1; }

// Rows of a chunk that decodes (or nearly) are dealt out split by split; where several see the same
// blocks of a full split, that is read once for all of them.
static void plan_attention(AttentionPlan& plan, const Model& model, const Step& step,
                           const Row* rows, const int64_t* kept, int64_t num_kept) {
    const int64_t band_tokens = kBandRows > model.group() ? kBandRows / model.group() : 1;
    int64_t num_bands = 0, num_members = 0;
    const bool is_last = kept != nullptr;
    const int64_t outs = is_last ? num_kept : step.num_rows;
    plan.partial_base = plan.bases_buffer.at_least(outs);
    plan.stacked = plan.stacked_buffer.at_least(outs);
    plan.num_stacked = plan.num_partials = 0;
    int64_t most_splits = 0;
    for (int64_t out = 0; out < outs; out++) {
        const Row& row = rows[is_last ? kept[out] : out];
        if (!is_last && step.chunks[row.chunk].num_rows > kFewRows) continue;
        const int64_t splits = num_splits(row.position);
        plan.partial_base[out] = plan.num_partials;
        plan.stacked[plan.num_stacked++] = out;
        plan.num_partials += splits;
        most_splits = splits > most_splits ? splits : most_splits;
    }
    num_members = plan.num_partials;
    if (!is_last) {
        for (int64_t c = 0; c < step.num_chunks; c++) {
            if (step.chunks[c].num_rows > kFewRows) {
                num_bands += (step.chunks[c].num_rows + band_tokens - 1) / band_tokens;
            }
        }
    }
    plan.bands = plan.bands_buffer.at_least(num_bands + 1);
    plan.stacks = plan.stacks_buffer.at_least(num_members + 1);
    plan.members = plan.members_buffer.at_least(num_members + 1);
    plan.num_bands = plan.num_stacks = plan.num_members = 0;
    if (!is_last) {
        for (int64_t c = 0; c < step.num_chunks; c++) {
            const int64_t tokens = step.chunks[c].num_rows;
            if (tokens <= kFewRows) continue;
            for (int64_t t = 0; t < tokens; t += band_tokens) {
                const int64_t size = tokens - t < band_tokens ? tokens - t : band_tokens;
                plan.bands[plan.num_bands++] = {c, t, size};
            }
        }
    }
    for (int64_t split = 0; split < most_splits; split++) {
        // Members of one stack must stand together: each unplaced row leads, equal ones follow.
        const int64_t first_stack = plan.num_stacks;
        const int64_t end = (split + 1) * kSplit;
        const int64_t first_block = split * kSplit / model.block_size;
        const int64_t num_blocks = (end - 1) / model.block_size + 1 - first_block;
        for (int64_t i = 0; i < plan.num_stacked; i++) {
            const int64_t out = plan.stacked[i];
            const int64_t r = is_last ? kept[out] : out;
            if (rows[r].position < split * kSplit) continue;
            const bool is_full = rows[r].position >= end - 1;
            const int limit = static_cast<int>((is_full ? end : rows[r].position + 1) -
                                               split * kSplit);
            const uint64_t* blocks = step.chunks[rows[r].chunk].blocks + first_block;
            bool is_placed = false;
            for (int64_t s = first_stack; is_full && s < plan.num_stacks && !is_placed; s++) {
                const Member& leader = plan.members[plan.stacks[s].first_member];
                if (leader.limit != kSplit) continue;
                const uint64_t* others =
                    step.chunks[rows[leader.row].chunk].blocks + first_block;
                is_placed = others[0] == blocks[0] &&
                            !memcmp(others, blocks, num_blocks * sizeof *blocks);
                if (!is_placed) continue;
                Stack& stack = plan.stacks[s];
                const int64_t place = stack.first_member + stack.num_members;
                memmove(plan.members + place + 1, plan.members + place,
                        (plan.num_members - place) * sizeof *plan.members);
                plan.members[place] = {r, out, limit};
                stack.num_members++;
                for (int64_t later = s + 1; later < plan.num_stacks; later++) {
                    plan.stacks[later].first_member++;
                }
            }
            if (!is_placed) {
                plan.stacks[plan.num_stacks++] = {split, plan.num_members, 1};
                plan.members[plan.num_members] = {r, out, limit};
            }
            plan.num_members++;
        }
    }
}

// x = hidden / rms · weight
static void normalise(const float* hidden, const float* weight, int64_t size, float eps,
                      operand* x) {
    vf squares = vf{};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) squares += load(hidden + i) * load(hidden + i);
    float sum = sum_of(squares);
    for (int64_t j = i; j < size; j++) sum += hidden[j] * hidden[j];
    const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(size) + eps);
    for (i = 0; i + kLanes <= size; i += kLanes) {
        store_operand(x + i, load(hidden + i) * scale * load(weight + i));
    }
    if (i < size) {
        float rest[kLanes] = {};
        for (int64_t j = i; j < size; j++) rest[j - i] = hidden[j] * scale * weight[j];
        operand stored[kLanes];
        store_operand(stored, load(rest));
        for (int64_t j = i; j < size; j++) x[j] = stored[j - i];
    }
}

static void add_bias(float* y, const float* bias, int64_t size) {
    if (!bias) return;
    for (int64_t i = 0; i < size; i++) y[i] += bias[i];
}

// Half-split rotary: dimension i pairs with i + head_dim / 2.
static void rotate(float* head, const float* turns, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = head[i], b = head[half + i], cos = turns[i], sin = turns[half + i];
        head[i] = a * cos - b * sin;
        head[half + i] = b * cos + a * sin;
    }
}

static void write_key(const Row& row, int64_t base, const float* head, int64_t head_dim) {
    uint16_t* place = row.block + base + row.inside / kPanel * kPanel * head_dim +
                      row.inside % kPanel * 2;
    for (int64_t i = 0; i < head_dim / 2; i++) {
        const uint32_t pair =
            round_to_bf16(head[2 * i]) | round_to_bf16(head[2 * i + 1]) << 16;
        __builtin_memcpy(place + i * 2 * kPanel, &pair, 4);
    }
}

// The first token of a pair clears the second's place: a weight of 0 times whatever stood there
// (a NaN) would not be 0.
static void write_value(const Row& row, int64_t base, const float* head, int64_t head_dim,
                        int64_t block_size) {
    uint16_t* place = row.block + base + row.inside / 2 * 2 * kPanel;
    const bool is_second = row.inside % 2;
    for (int64_t d = 0; d < head_dim; d += kPanel, place += block_size * kPanel) {
        for (int64_t i = 0; i < kPanel; i += kLanes) {
            const vu bits = round_to_bf16(load(head + d + i));
            uint16_t* words = place + 2 * i;
            store_words(words,
                        is_second ? (load_words(words) & 0xffffu) | bits << 16 : bits);
        }
    }
}

// How many panels a unit has so that the threads' shares are even.
static int64_t unit_panels(int64_t num_panels, int threads) {
    int64_t best = 1, least = num_panels + kUnitPanels;
    for (int64_t size = kUnitPanels; size >= 1; size--) {
        const int64_t units = (num_panels + size - 1) / size;
        const int64_t share = (units + threads - 1) / threads * size;
        if (share < least) {
            least = share;
            best = size;
        }
    }
    return best;
}

class Run {
  public:
    Run(const Model& model, const Step& step, Memory& memory, Threads& threads, double* seconds)
        : model_(model), step_(step), memory_(memory), threads_(threads), seconds_(seconds) {}

    void prepare() {
        const int64_t rows = step_.num_rows, threads = threads_.count();
        hidden_size_ = padded(model_.hidden);
        head_ = model_.padded_head();
        mixed_size_ = model_.num_heads * head_;
        ffn_size_ = padded(model_.ffn);
        ld_hidden_ = hidden_size_ + kGap;
        ld_mixed_ = mixed_size_ + kGap;
        ld_gated_ = ffn_size_ + kGap;
        rows_ = memory_.rows.at_least(rows);
        kept_ = memory_.kept.at_least(step_.num_logits + 1);
        turns_ = memory_.turns.at_least(rows * model_.head_dim);
        hidden_ = memory_.hidden.at_least(rows * hidden_size_);
        kept_hidden_ = memory_.kept_hidden.at_least(step_.num_logits * hidden_size_);
        x_ = memory_.x.at_least(rows * ld_hidden_);
        q_ = memory_.q.at_least(rows * mixed_size_);
        mixed_ = memory_.mixed.at_least(rows * ld_mixed_);
        gated_ = memory_.gated.at_least(rows * ld_gated_);
        own_size_ = kFewRows * (ld_hidden_ + ld_mixed_);
        own_x_ = memory_.own_x.at_least(threads * own_size_);
        const int64_t group = model_.group();
        const int64_t band_rows = kBandRows > group ? kBandRows : group;
        sums_size_ = kRowBlock * kUnitPanels * kPanel;
        if (sums_size_ < kRowBlock * head_) sums_size_ = kRowBlock * head_;
        if (sums_size_ < 2 * band_rows * head_) sums_size_ = 2 * band_rows * head_;
        sums_ = memory_.sums.at_least(threads * sums_size_);
        for (int64_t c = 0; c < step_.num_chunks; c++) {
            const Chunk& chunk = step_.chunks[c];
            for (int64_t t = 0; t < chunk.num_rows; t++) {
                const int64_t position = chunk.start + t;
                rows_[chunk.first_row + t] = {
                    position,
                    reinterpret_cast<uint16_t*>(chunk.blocks[position / model_.block_size]),
                    position % model_.block_size, c, position >= chunk.write_from};
            }
            if (chunk.logits_row >= 0) {
                kept_[chunk.logits_row] = chunk.first_row + chunk.num_rows - 1;
            }
        }
        plan_attention(memory_.plan, model_, step_, rows_, nullptr, 0);
        plan_attention(memory_.last_plan, model_, step_, rows_, kept_, step_.num_logits);
        const int64_t partials = memory_.plan.num_partials > memory_.last_plan.num_partials
                                     ? memory_.plan.num_partials
                                     : memory_.last_plan.num_partials;
        partials_ = memory_.partials.at_least(partials * model_.num_heads);
        values_ = memory_.partial_values.at_least(partials * model_.num_heads * head_);
    }

    void work(int self) {
        Clock clock(self ? nullptr : seconds_);
        embed(self);
        clock.end(kEmbed);
        int64_t rows = step_.num_rows;
        float* hidden = hidden_;
        for (int64_t l = 0; l < model_.num_layers; l++) {
            const Layer& layer = model_.layers[l];
            const bool is_last = l == model_.num_layers - 1;
            qkv(self, l, layer);
            clock.end(kQkv);
            if (is_last) {
                // Only rows whose logits are wanted go on behind the last KV.
                rows = step_.num_logits;
                if (!rows) return;
                keep(self);
                hidden = kept_hidden_;
            }
            const AttentionPlan& plan = is_last ? memory_.last_plan : memory_.plan;
            attend(self, l, plan);
            clock.end(kAttention);
            operand* own = own_x_ + self * own_size_;
            const operand* x = input(self, rows, mixed_, own + kFewRows * ld_hidden_, ld_mixed_,
                                     plan.num_stacked,
                                     [&](int64_t i, operand* x_row) {
                                         const int64_t out = plan.stacked[i];
                                         merge_row(plan, out, x_row);
                                     },
                                     plan.stacked);
            add_product(self, x, ld_mixed_, rows, layer.o, hidden);
            clock.end(kOutput);
            x = normalised(self, hidden, rows, layer.post_norm);
            gate_up(self, x, rows, layer);
            clock.end(kGateUp);
            add_product(self, gated_, ld_gated_, rows, layer.down, hidden);
            clock.end(kDown);
        }
        const operand* x = normalised(self, hidden, rows, model_.final_norm);
        logits(self, x, rows);
        clock.end(kHead);
    }

  private:
    class Clock {
      public:
        explicit Clock(double* seconds) : seconds_(seconds), last_(seconds ? now() : 0) {}
        void end(Phase phase) {
            if (!seconds_) return;
            const double time = now();
            seconds_[phase] += time - last_;
            last_ = time;
        }

      private:
        static double now() {
            timespec time;
            clock_gettime(CLOCK_MONOTONIC, &time);
            return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
        }
        double* seconds_;
        double last_;
    };

    float* sums_of(int self) { return sums_ + self * sums_size_; }

    // A GEMM's input, row i of `count` made by fill(i, place). Few rows are made by every thread for
    // itself: cheaper than to meet once more. `places` says where row i belongs, null: at i.
    template <class Fill>
    const operand* input(int self, int64_t rows, operand* shared, operand* own, int64_t ld,
                         int64_t count, Fill fill, const int64_t* places = nullptr) {
        const bool is_few = rows <= kFewRows;
        operand* x = is_few ? own : shared;
        const auto make = [&](int64_t i) { fill(i, x + (places ? places[i] : i) * ld); };
        if (is_few) {
            for (int64_t i = 0; i < count; i++) make(i);
        } else {
            threads_.each(self, count, make);
        }
        return x;
    }

    const operand* normalised(int self, const float* hidden, int64_t rows, const float* weight) {
        operand* own = own_x_ + self * own_size_;
        return input(self, rows, x_, own, ld_hidden_, rows, [&](int64_t r, operand* x) {
            normalise(hidden + r * hidden_size_, weight, model_.hidden, model_.rms_eps, x);
        });
    }

    // done(first row, number of rows, sums, ld) for each block of rows of x · panels.
    template <class Done>
    void product(int self, const operand* x, int64_t ldx, int64_t rows,
                 const uint16_t* const* panels, int64_t num_panels, int64_t columns, Done done) {
        float* y = sums_of(self);
        const int64_t ldy = num_panels * kPanel;
        for (int64_t r = 0; r < rows; r += kRowBlock) {
            const int64_t count = rows - r < kRowBlock ? rows - r : kRowBlock;
            multiply_block(x + r * ldx, ldx, count, panels, num_panels, columns, y, ldy);
            done(r, count, y, ldy);
        }
    }

    void embed(int self) {
        const int64_t pairs = model_.embedding.columns / 2, half = model_.head_dim / 2;
        threads_.each(self, step_.num_rows, [&](int64_t r) {
            const int64_t token = step_.tokens[r];
            const uint16_t* place =
                model_.embedding.panel(token / kPanel) + token % kPanel * 2;
            float* hidden = hidden_ + r * hidden_size_;
            for (int64_t i = 0; i < pairs; i++) {
                uint32_t pair;
                __builtin_memcpy(&pair, place + i * 2 * kPanel, 4);
                const uint32_t first = pair << 16, second = pair & 0xffff0000u;
                __builtin_memcpy(hidden + 2 * i, &first, 4);
                __builtin_memcpy(hidden + 2 * i + 1, &second, 4);
            }
            float* turns = turns_ + r * model_.head_dim;
            for (int64_t i = 0; i < half; i++) {
                const double angle = static_cast<float>(rows_[r].position) * model_.frequencies[i];
                turns[i] = static_cast<float>(__builtin_cos(angle));
                turns[half + i] = static_cast<float>(__builtin_sin(angle));
            }
        });
    }

    void qkv(int self, int64_t l, const Layer& layer) {
        const operand* x = normalised(self, hidden_, step_.num_rows, layer.input_norm);
        const int64_t heads = model_.num_heads, kv_heads = model_.num_kv_heads;
        const int64_t head_panels = head_ / kPanel, dim = model_.head_dim;
        threads_.each(self, heads + 2 * kv_heads, [&](int64_t unit) {
            const bool is_q = unit < heads, is_k = !is_q && unit < heads + kv_heads;
            const int64_t head = is_q ? unit : is_k ? unit - heads : unit - heads - kv_heads;
            const Matrix& w = is_q ? layer.q : is_k ? layer.k : layer.v;
            const uint16_t* panels[kMaxHeadPanels];
            for (int64_t p = 0; p < head_panels; p++) panels[p] = w.panel(head * head_panels + p);
            const float* bias = w.bias ? w.bias + head * dim : nullptr;
            const int64_t base =
                ((l * kv_heads + head) * 2 + (is_k ? 0 : 1)) * model_.kv_part();
            product(self, x, ld_hidden_, step_.num_rows, panels, head_panels, w.columns,
                    [&](int64_t first, int64_t count, float* y, int64_t ldy) {
                        for (int64_t i = 0; i < count; i++) {
                            const Row& row = rows_[first + i];
                            float* values = y + i * ldy;
                            add_bias(values, bias, dim);
                            if (is_q || is_k) {
                                rotate(values, turns_ + (first + i) * dim, dim);
                            }
                            if (is_q) {
                                store_query(first + i, head, values);
                            } else if (!row.is_written) {
                                continue;
                            } else if (is_k) {
                                write_key(row, base, values, head_);
                            } else {
                                write_value(row, base, values, head_, model_.block_size);
                            }
                        }
                    });
        });
    }

    // [KV head][row][head of its group][head_], so that a KV head's rows stand together.
    operand* query(int64_t kv_head, int64_t row) {
        return q_ + (kv_head * step_.num_rows + row) * model_.group() * head_;
    }

    void store_query(int64_t row, int64_t head, const float* values) {
        const int64_t group = model_.group();
        operand* place = query(head / group, row) + head % group * head_;
        for (int64_t d = 0; d < head_; d += kLanes) store_operand(place + d, load(values + d));
    }

    void keep(int self) {
        threads_.each(self, step_.num_logits, [&](int64_t i) {
            memcpy(kept_hidden_ + i * hidden_size_, hidden_ + kept_[i] * hidden_size_,
                   hidden_size_ * sizeof(float));
        });
    }

    void attend(int self, int64_t l, const AttentionPlan& plan) {
        const int64_t kv_heads = model_.num_kv_heads;
        // The last tokens of a prefill see most: they begin.
        threads_.each(self, (plan.num_bands + plan.num_stacks) * kv_heads, [&](int64_t unit) {
            const int64_t kv_head = unit % kv_heads, item = unit / kv_heads;
            if (item < plan.num_bands) {
                attend_band(self, l, kv_head, plan.bands[plan.num_bands - 1 - item]);
            } else {
                attend_stack(l, kv_head, plan, plan.stacks[item - plan.num_bands]);
            }
        });
    }

    // In units of log 2: exponentials are then powers of two.
    float score_scale() const {
        return 1.44269504f / __builtin_sqrtf(static_cast<float>(model_.head_dim));
    }

    void attend_band(int self, int64_t l, int64_t kv_head, const Band& band) {
        const int64_t group = model_.group(), rows = band.num_tokens * group;
        const Chunk& chunk = step_.chunks[band.chunk];
        const int64_t first_row = chunk.first_row + band.first_token;
        const int64_t first_position = chunk.start + band.first_token;
        const int64_t last_position = first_position + band.num_tokens - 1;
        const operand* q = query(kv_head, first_row);
        float* acc = sums_of(self);
        float* o = acc + rows * head_;
        Softmax totals[kMaxBandRows], split_softmax[CW_ROWS];
        memset(acc, 0, rows * head_ * sizeof(float));
        for (int64_t r = 0; r < rows; r++) totals[r] = {kNothing, 0};
        const Tiling tiling(rows);
        for (int64_t split = 0; split < num_splits(last_position); split++) {
            const int64_t begin = split * kSplit;
            const int64_t seen = last_position + 1 - begin;
            const Keys keys =
                keys_of(model_, chunk, l, kv_head, split, seen < kSplit ? seen : kSplit);
            for (int64_t i = 0; i < tiling.count; i++) {
                // Rows of tokens before the split see nothing of it.
                int64_t r = tiling.begin(i);
                const int64_t end = tiling.begin(i + 1);
                const int64_t first_seeing = (begin - first_position) * group;
                if (r < first_seeing) r = first_seeing;
                if (r >= end) continue;
                int limits[CW_ROWS];
                for (int64_t j = r; j < end; j++) {
                    const int64_t limit = first_position + j / group + 1 - begin;
                    limits[j - r] = static_cast<int>(limit < kSplit ? limit : kSplit);
                }
                attend_rows(q + r * head_, head_, static_cast<int>(end - r), limits, keys, head_,
                            score_scale(), o, head_, split_softmax);
                for (int64_t j = r; j < end; j++) {
                    merge(acc + j * head_, totals[j], o + (j - r) * head_, split_softmax[j - r],
                          head_);
                }
            }
        }
        for (int64_t r = 0; r < rows; r++) {
            operand* place =
                mixed_ + (first_row + r / group) * ld_mixed_ + (kv_head * group + r % group) * head_;
            finish(acc + r * head_, totals[r], place, head_);
        }
    }

    void attend_stack(int64_t l, int64_t kv_head, const AttentionPlan& plan, const Stack& stack) {
        const int64_t group = model_.group(), rows = stack.num_members * group;
        const Member* members = plan.members + stack.first_member;
        int64_t seen = 0;
        for (int64_t i = 0; i < stack.num_members; i++) {
            seen = members[i].limit > seen ? members[i].limit : seen;
        }
        const Chunk& chunk = step_.chunks[rows_[members[0].row].chunk];
        const Keys keys = keys_of(model_, chunk, l, kv_head, stack.split, seen);
        const Tiling tiling(rows);
        alignas(64) operand q[CW_ROWS * kMaxHead];
        alignas(64) float o[CW_ROWS * kMaxHead];
        for (int64_t i = 0; i < tiling.count; i++) {
            const int64_t begin = tiling.begin(i), size = tiling.size(i);
            int limits[CW_ROWS];
            Softmax softmax[CW_ROWS];
            for (int64_t j = 0; j < size; j++) {
                const Member& member = members[(begin + j) / group];
                limits[j] = member.limit;
                memcpy(q + j * head_, query(kv_head, member.row) + (begin + j) % group * head_,
                       head_ * sizeof *q);
            }
            attend_rows(q, head_, static_cast<int>(size), limits, keys, head_, score_scale(), o,
                        head_, softmax);
            for (int64_t j = 0; j < size; j++) {
                const Member& member = members[(begin + j) / group];
                const int64_t head = kv_head * group + (begin + j) % group;
                const int64_t place =
                    (plan.partial_base[member.out] + stack.split) * model_.num_heads + head;
                partials_[place] = softmax[j];
                memcpy(values_ + place * head_, o + j * head_, head_ * sizeof *o);
            }
        }
    }

    void merge_row(const AttentionPlan& plan, int64_t out, operand* x) {
        const int64_t position =
            rows_[&plan == &memory_.last_plan ? kept_[out] : out].position;
        for (int64_t head = 0; head < model_.num_heads; head++) {
            alignas(64) float acc[kMaxHead] = {};
            Softmax total = {kNothing, 0};
            for (int64_t split = 0; split < num_splits(position); split++) {
                const int64_t place =
                    (plan.partial_base[out] + split) * model_.num_heads + head;
                merge(acc, total, values_ + place * head_, partials_[place], head_);
            }
            finish(acc, total, x + head * head_, head_);
        }
    }

    // hidden += x · w
    void add_product(int self, const operand* x, int64_t ldx, int64_t rows, const Matrix& w,
                     float* hidden) {
        const int64_t size = unit_panels(w.num_panels, threads_.count());
        threads_.each(self, (w.num_panels + size - 1) / size, [&](int64_t unit) {
            const int64_t first = unit * size;
            const int64_t count = w.num_panels - first < size ? w.num_panels - first : size;
            const uint16_t* panels[kUnitPanels];
            for (int64_t p = 0; p < count; p++) panels[p] = w.panel(first + p);
            const int64_t begin = first * kPanel, end = begin + count * kPanel;
            product(self, x, ldx, rows, panels, count, w.columns,
                    [&](int64_t first_row, int64_t num, float* y, int64_t ldy) {
                        for (int64_t r = 0; r < num; r++) {
                            float* place = hidden + (first_row + r) * hidden_size_ + begin;
                            if (w.bias) {
                                const int64_t real = end < model_.hidden ? end : model_.hidden;
                                add_bias(place, w.bias + begin, real - begin);
                            }
                            for (int64_t i = 0; i < count * kPanel; i += kLanes) {
                                store(place + i, load(place + i) + load(y + r * ldy + i));
                            }
                        }
                    });
        });
    }

    void gate_up(int self, const operand* x, int64_t rows, const Layer& layer) {
        constexpr int kPairs = kUnitPanels / 2;
        const int64_t num = layer.gate.num_panels;
        threads_.each(self, (num + kPairs - 1) / kPairs, [&](int64_t unit) {
            const int64_t first = unit * kPairs;
            const int64_t count = num - first < kPairs ? num - first : kPairs;
            const uint16_t* panels[kUnitPanels];
            for (int64_t p = 0; p < count; p++) {
                panels[p] = layer.gate.panel(first + p);
                panels[count + p] = layer.up.panel(first + p);
            }
            const int64_t begin = first * kPanel, width = count * kPanel;
            const int64_t real = (begin + width < model_.ffn ? begin + width : model_.ffn) - begin;
            product(self, x, ld_hidden_, rows, panels, 2 * count, layer.gate.columns,
                    [&](int64_t first_row, int64_t num_rows, float* y, int64_t ldy) {
                        for (int64_t r = 0; r < num_rows; r++) {
                            float* gate = y + r * ldy;
                            float* up = gate + width;
                            if (layer.gate.bias) add_bias(gate, layer.gate.bias + begin, real);
                            if (layer.up.bias) add_bias(up, layer.up.bias + begin, real);
                            operand* place = gated_ + (first_row + r) * ld_gated_ + begin;
                            for (int64_t i = 0; i < width; i += kLanes) {
                                const vf g = load(gate + i);
                                vf power = g * -1.44269504f;
                                power = select(power < 126.0f, power, splat(126.0f));
                                const vf silu = g / (exp2_of(power) + 1.0f);
                                store_operand(place + i, silu * load(up + i));
                            }
                        }
                    });
        });
    }

    void logits(int self, const operand* x, int64_t rows) {
        const Matrix& w = model_.head;
        const int64_t units = (w.num_panels + kUnitPanels - 1) / kUnitPanels;
        threads_.each(self, units, [&](int64_t unit) {
            const int64_t first = unit * kUnitPanels;
            const int64_t left = w.num_panels - first;
            const int64_t count = left < kUnitPanels ? left : kUnitPanels;
            const uint16_t* panels[kUnitPanels];
            for (int64_t p = 0; p < count; p++) panels[p] = w.panel(first + p);
            const int64_t begin = first * kPanel;
            const int64_t end = begin + count * kPanel < model_.vocab ? begin + count * kPanel
                                                                       : model_.vocab;
            product(self, x, ld_hidden_, rows, panels, count, w.columns,
                    [&](int64_t first_row, int64_t num, float* y, int64_t ldy) {
                        for (int64_t r = 0; r < num; r++) {
                            memcpy(step_.logits + (first_row + r) * model_.vocab + begin,
                                   y + r * ldy, (end - begin) * sizeof(float));
                        }
                    });
        });
    }

    const Model& model_;
    const Step& step_;
    Memory& memory_;
    Threads& threads_;
    double* seconds_;
    int64_t hidden_size_, head_, mixed_size_, ffn_size_;
    int64_t ld_hidden_, ld_mixed_, ld_gated_;
    int64_t own_size_, sums_size_;
    Row* rows_;
    int64_t* kept_;
    float *turns_, *hidden_, *kept_hidden_, *sums_, *values_;
    operand *x_, *q_, *mixed_, *gated_, *own_x_;
    Softmax* partials_;
};
