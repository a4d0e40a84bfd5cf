// What the binding hands to the kernels: a model in place, and one step over it.
//
// Every matrix is stored as panels of 32 outputs for one packed GEMM (see gemm.inl):
//
//     [Np/32][Kp/2][32][2] bf16        panel p: outputs 32p … 32p+31; for each pair of inputs,
//                                      32 outputs x 2 consecutive inputs, 128 bytes
//
// A KV block of B tokens (a multiple of 32) holds operands of the same shape, for each layer and
// KV head, D = head_dim padded to a multiple of 32:
//
//     K [B/32][D/2][32][2]             the outputs are tokens, the inputs are dimensions
//     V [D/32][B/2][32][2]             the outputs are dimensions, the inputs are tokens
#pragma once

#include <cstddef>
#include <cstdint>

namespace cachewarm {

constexpr int kPanel = 32;     // outputs of a panel
constexpr int kMaxHead = 256;  // head_dim
constexpr int kMaxGroup = 96;  // query heads of a KV head

constexpr int64_t padded(int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }

struct Matrix {
    const uint16_t* panels;
    const float* bias;  // unpadded, or null
    int64_t num_panels;
    int64_t columns;  // padded

    const uint16_t* panel(int64_t i) const { return panels + i * columns * kPanel; }
};

struct Layer {
    const float* input_norm;
    const float* post_norm;
    Matrix q, k, v, o, gate, up, down;
};

struct Model {
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, ffn, vocab, block_size;
    float rms_eps;
    const float* frequencies;  // [head_dim / 2]
    const float* final_norm;
    Matrix embedding, head;  // rows of the embedding are gathered from its panels
    const Layer* layers;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t padded_head() const { return padded(head_dim); }
    int64_t kv_part() const { return block_size * padded_head(); }  // elements of one K or one V
    int64_t block_elements() const { return num_layers * num_kv_heads * 2 * kv_part(); }
};

// Consecutive rows of a step: a run of tokens of one sequence.
struct Chunk {
    int64_t first_row, num_rows;
    int64_t start;       // position of the first token
    int64_t write_from;  // KV of earlier positions is there already
    const uint64_t* blocks;  // addresses, in position order
    int64_t logits_row;  // of the output, for the last token; -1 = not wanted
};

struct Step {
    const int32_t* tokens;  // [num_rows]
    int64_t num_rows;
    const Chunk* chunks;
    int64_t num_chunks;
    float* logits;  // [num_logits, vocab]
    int64_t num_logits;
};

// Where a step's time went, in seconds; one entry for each kind of phase.
enum Phase { kEmbed, kQkv, kAttention, kOutput, kGateUp, kDown, kHead, kNumPhases };

class Threads;

// Memory of one executor that outlives a step; grows with the largest one.
class Workspace;

// One instruction set's kernels.
struct Isa {
    const char* name;
    Workspace* (*make_workspace)();
    void (*drop_workspace)(Workspace*);
    void (*run)(const Model&, const Step&, Workspace&, Threads&, double* phase_seconds);
    // Y [rows, 32 * num_panels] = X [rows, columns] (rounded as the ISA does) · W; for tests and
    // measurements.
    void (*multiply)(const float* x, int64_t rows, const Matrix& w, float* y, Threads& threads,
                     int64_t repeats);
};

extern const Isa kPortable;
#if defined(__x86_64__)
extern const Isa kAvx2, kAvx512, kAvx512Bf16;
#endif

}  // namespace cachewarm
