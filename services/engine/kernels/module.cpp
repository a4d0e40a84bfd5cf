// The extension module engine.kernels._kernels.
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "step.h"
#include "threads.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace nb = nanobind;

namespace cachewarm {
namespace {

// The best instruction set that the CPU has and the kernel keeps registers for.
// cpuid by hand and not __builtin_cpu_supports: zig's runtime answers that one with 0, always.
const char* best_isa() {
#if defined(__x86_64__)
    constexpr unsigned kXsave = 1u << 27;                        // leaf 1, ecx: OSXSAVE
    constexpr unsigned kFma = 1u << 12;                          // leaf 1, ecx
    constexpr unsigned kAvx2Bit = 1u << 5;                       // leaf 7.0, ebx
    constexpr unsigned kAvx512Bits =                             // leaf 7.0, ebx:
        1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;               //   F, DQ, BW, VL
    constexpr unsigned kBf16 = 1u << 5;                          // leaf 7.1, eax
    constexpr unsigned kYmmState = 0x06, kZmmState = 0xe6;       // XCR0

    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & (kXsave | kFma)) != (kXsave | kFma)) {
        return "portable";
    }
    unsigned xcr0, high;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & kAvx2Bit) ||
        (xcr0 & kYmmState) != kYmmState) {
        return "portable";
    }
    if ((ebx & kAvx512Bits) != kAvx512Bits || (xcr0 & kZmmState) != kZmmState) {
        return "avx2";
    }
    const bool has_leaf_7_1 = eax >= 1;  // eax of leaf 7.0 is the highest subleaf
    if (has_leaf_7_1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kBf16)) {
        return "avx512_bf16";
    }
    return "avx512";
#else
    return "portable";
#endif
}

// Best first: a CPU that has one has all that follow it.
std::vector<const Isa*> isas() {
    std::vector<const Isa*> all{&kPortable};
#if defined(__x86_64__)
    all = {&kAvx512Bf16, &kAvx512, &kAvx2, &kPortable};
#endif
    const std::string best = best_isa();
    while (all.front()->name != best) all.erase(all.begin());
    return all;
}

const Isa& isa_named(const std::string& name) {
    std::string allowed;
    for (const Isa* isa : isas()) {
        if (name == isa->name) return *isa;
        allowed += (allowed.empty() ? "" : ", ") + std::string(isa->name);
    }
    throw std::invalid_argument("instruction set " + name + " is not allowed: " + allowed);
}

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Addresses = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct WorkspaceOwner {
    const Isa& isa;
    Workspace* memory;
    explicit WorkspaceOwner(const Isa& i) : isa(i), memory(i.make_workspace()) {}
    ~WorkspaceOwner() { isa.drop_workspace(memory); }
    WorkspaceOwner(const WorkspaceOwner&) = delete;
};

// A model's weights in place and the means to run steps over them. Not thread-safe: one step at a
// time. Python passes sizes and offsets that follow from the pack plan; all are checked here against
// the memory they lie in, since a wrong one would be a crash.
class Decoder {
  public:
    Decoder(Bytes weights, Floats frequencies, nb::dict shape, nb::dict tensors,
            const std::string& isa, std::shared_ptr<Threads> threads)
        : weights_(weights), isa_(isa_named(isa)), threads_(std::move(threads)), workspace_(isa_) {
        const auto size = [&](const char* name) { return nb::cast<int64_t>(shape[name]); };
        model_.num_layers = size("num_layers");
        model_.hidden = size("hidden_size");
        model_.num_heads = size("num_heads");
        model_.num_kv_heads = size("num_kv_heads");
        model_.head_dim = size("head_dim");
        model_.ffn = size("ffn_size");
        model_.vocab = size("vocab_size");
        model_.block_size = size("block_size");
        model_.rms_eps = nb::cast<float>(shape["rms_eps"]);
        if (model_.head_dim > kMaxHead || model_.head_dim % 2 || model_.num_kv_heads < 1 ||
            model_.num_heads % model_.num_kv_heads || model_.group() > kMaxGroup ||
            model_.block_size % kPanel || model_.block_size < kPanel) {
            throw std::invalid_argument("a shape that these kernels can't compute");
        }
        if (static_cast<int64_t>(frequencies.size()) != model_.head_dim / 2) {
            throw std::invalid_argument("frequencies: head_dim / 2 are needed");
        }
        frequencies_.assign(frequencies.data(), frequencies.data() + frequencies.size());
        model_.frequencies = frequencies_.data();
        const int64_t hidden = padded(model_.hidden), ffn = padded(model_.ffn);
        const int64_t q_rows = model_.num_heads * model_.padded_head();
        const int64_t kv_rows = model_.num_kv_heads * model_.padded_head();
        const auto matrix = [&](const std::string& name, int64_t rows, int64_t columns,
                                int64_t bias_size) {
            Matrix m{};
            m.panels = place<uint16_t>(tensors, name + ".weight", rows * columns);
            m.num_panels = rows / kPanel;
            m.columns = columns;
            const std::string bias = name + ".bias";
            if (tensors.contains(bias.c_str())) m.bias = place<float>(tensors, bias, bias_size);
            return m;
        };
        model_.embedding = matrix("model.embed_tokens", padded(model_.vocab), hidden, 0);
        model_.head = matrix("lm_head", padded(model_.vocab), hidden, 0);
        model_.final_norm = place<float>(tensors, "model.norm.weight", model_.hidden);
        for (int64_t l = 0; l < model_.num_layers; l++) {
            const std::string prefix = "model.layers." + std::to_string(l) + ".";
            const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
            const int64_t q = model_.num_heads * model_.head_dim;
            const int64_t kv = model_.num_kv_heads * model_.head_dim;
            Layer layer;
            layer.input_norm =
                place<float>(tensors, prefix + "input_layernorm.weight", model_.hidden);
            layer.post_norm =
                place<float>(tensors, prefix + "post_attention_layernorm.weight", model_.hidden);
            layer.q = matrix(attention + "q_proj", q_rows, hidden, q);
            layer.k = matrix(attention + "k_proj", kv_rows, hidden, kv);
            layer.v = matrix(attention + "v_proj", kv_rows, hidden, kv);
            layer.o = matrix(attention + "o_proj", hidden, q_rows, model_.hidden);
            layer.gate = matrix(mlp + "gate_proj", ffn, hidden, model_.ffn);
            layer.up = matrix(mlp + "up_proj", ffn, hidden, model_.ffn);
            layer.down = matrix(mlp + "down_proj", hidden, ffn, model_.hidden);
            layers_.push_back(layer);
        }
        model_.layers = layers_.data();
    }

    // chunks [n, 6]: first block in `blocks`, number of blocks, number of tokens, start, write_from,
    // row of `logits` or -1. Tokens of all chunks stand one after the other.
    void step(Tokens tokens, Table chunks, Addresses blocks, Rows logits) {
        if (chunks.shape(1) != 6 ||
            (logits.shape(0) && static_cast<int64_t>(logits.shape(1)) != model_.vocab)) {
            throw std::invalid_argument("step: chunks [n, 6] and logits [n, vocab] are needed");
        }
        std::vector<Chunk> list(chunks.shape(0));
        const int64_t num_logits = static_cast<int64_t>(logits.shape(0));
        int64_t row = 0, wanted = 0;
        for (size_t c = 0; c < list.size(); c++) {
            const int64_t* entry = chunks.data() + 6 * c;
            const int64_t first = entry[0], num_blocks = entry[1], num = entry[2];
            list[c] = {row, num, entry[3], entry[4], blocks.data() + first, entry[5]};
            if (first < 0 || num_blocks < 0 || num < 1 || entry[3] < 0 ||
                first + num_blocks > static_cast<int64_t>(blocks.size()) ||
                entry[3] + num > num_blocks * model_.block_size) {
                throw std::invalid_argument("step: a chunk without blocks for its tokens");
            }
            if (entry[5] >= 0 && entry[5] != wanted++) {
                throw std::invalid_argument("step: logits rows must be counted up");
            }
            row += num;
        }
        if (row != static_cast<int64_t>(tokens.size()) || wanted != num_logits) {
            throw std::invalid_argument("step: tokens or logits of another number than chunks say");
        }
        for (size_t i = 0; i < tokens.size(); i++) {
            if (tokens.data()[i] < 0 || tokens.data()[i] >= model_.vocab) {
                throw std::invalid_argument("step: a token outside the vocabulary");
            }
        }
        if (!row) return;
        const Step step{tokens.data(), row,          list.data(), static_cast<int64_t>(list.size()),
                        logits.data(), num_logits};
        nb::gil_scoped_release release;
        isa_.run(model_, step, *workspace_.memory, *threads_,
                 is_profiling_ ? phase_seconds_ : nullptr);
    }

    // Seconds by phase since the last call; from the first call on they are measured.
    nb::dict profile() {
        static const char* const names[kNumPhases] = {"embed",   "qkv",  "attention", "output",
                                                      "gate_up", "down", "head"};
        nb::dict result;
        for (int i = 0; i < kNumPhases; i++) {
            result[names[i]] = phase_seconds_[i];
            phase_seconds_[i] = 0;
        }
        is_profiling_ = true;
        return result;
    }

    const char* isa() const { return isa_.name; }

  private:
    template <class T>
    const T* place(nb::dict tensors, const std::string& name, int64_t count) {
        if (!tensors.contains(name.c_str())) {
            throw std::invalid_argument("tensor " + name + " is not in the plan");
        }
        const int64_t offset = nb::cast<int64_t>(tensors[name.c_str()]);
        const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
        if (offset < 0 || offset % 64 || offset + bytes > static_cast<int64_t>(weights_.size())) {
            throw std::invalid_argument("tensor " + name + " lies outside the weights");
        }
        return reinterpret_cast<const T*>(weights_.data() + offset);
    }

    Bytes weights_;  // keeps the mapping
    const Isa& isa_;
    std::shared_ptr<Threads> threads_;
    WorkspaceOwner workspace_;
    std::vector<float> frequencies_;
    std::vector<Layer> layers_;
    Model model_{};
    double phase_seconds_[kNumPhases] = {};
    bool is_profiling_ = false;
};

// y [rows, 32 * panels] = x [rows, columns] · panels; returns seconds for one of `repeats` products.
double multiply(ConstRows x, Bytes panels, Rows y, const std::string& isa, Threads& threads,
                int64_t repeats) {
    const int64_t columns = x.shape(1);
    Matrix w{reinterpret_cast<const uint16_t*>(panels.data()), nullptr, 0, columns};
    w.num_panels = y.shape(1) / kPanel;
    if (columns % kPanel || y.shape(1) % kPanel || y.shape(0) != x.shape(0) ||
        static_cast<int64_t>(panels.size()) != w.num_panels * kPanel * columns * 2) {
        throw std::invalid_argument("multiply: shapes that do not fit");
    }
    const Isa& chosen = isa_named(isa);
    nb::gil_scoped_release release;
    const auto start = std::chrono::steady_clock::now();
    chosen.multiply(x.data(), x.shape(0), w, y.data(), threads, repeats);
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    return passed.count() / static_cast<double>(repeats);
}

// Bytes a second of streaming reads by all threads: the best of `repeats` passes over `memory`.
double read_bandwidth(Bytes memory, Threads& threads, int repeats) {
    struct Pass {
        const uint8_t* memory;
        int64_t size;
        int num_threads;
        std::vector<uint64_t> sums;
    } pass{memory.data(), static_cast<int64_t>(memory.size()) / 64 * 64, threads.count(),
           std::vector<uint64_t>(threads.count() * 8)};
    const auto read = [](int self, void* context) {
        typedef uint64_t words __attribute__((vector_size(64), aligned(8), may_alias));
        Pass& p = *static_cast<Pass*>(context);
        const int64_t lines = p.size / 64;
        const int64_t begin = lines * self / p.num_threads, end = lines * (self + 1) / p.num_threads;
        words a = {}, b = {}, c = {}, d = {};
        const words* line = reinterpret_cast<const words*>(p.memory);
        // Four streams, as the kernels read four panels.
        const int64_t quarter = (end - begin) / 4;
        for (int64_t i = begin; i < begin + quarter; i++) {
            a += line[i];
            b += line[i + quarter];
            c += line[i + 2 * quarter];
            d += line[i + 3 * quarter];
        }
        a += b + c + d;
        p.sums[self * 8] = a[0];
    };
    nb::gil_scoped_release release;
    double best = 0;
    for (int i = 0; i < repeats; i++) {
        const auto start = std::chrono::steady_clock::now();
        threads.run(read, &pass);
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
        const double speed = static_cast<double>(pass.size) / passed.count();
        best = speed > best ? speed : best;
    }
    return best;
}

}  // namespace

NB_MODULE(_kernels, m) {
    m.attr("COMPILER") = __VERSION__;
    m.def(
        "isas",
        [] {
            std::vector<std::string> names;
            for (const Isa* isa : isas()) names.push_back(isa->name);
            return names;
        },
        "Instruction sets that run here, the best first: of avx512_bf16, avx512, avx2, portable.");
    nb::class_<Threads>(m, "Threads")
        .def(
            "__init__",
            [](Threads* self, const std::vector<int>& cpus) {
                if (cpus.empty()) throw std::invalid_argument("cpus: at least one is needed");
                const int count = static_cast<int>(cpus.size());
                new (self) Threads(count, cpus.data(), count);
            },
            nb::arg("cpus"), "One thread for each CPU, pinned to it; the caller is the first.")
        .def_prop_ro("count", &Threads::count);
    nb::class_<Decoder>(m, "Decoder")
        .def(nb::init<Bytes, Floats, nb::dict, nb::dict, const std::string&,
                      std::shared_ptr<Threads>>(),
             nb::arg("weights"), nb::arg("frequencies"), nb::arg("shape"), nb::arg("tensors"),
             nb::arg("isa"), nb::arg("threads"))
        .def("step", &Decoder::step, nb::arg("tokens"), nb::arg("chunks"), nb::arg("blocks"),
             nb::arg("logits"))
        .def("profile", &Decoder::profile)
        .def_prop_ro("isa", &Decoder::isa);
    m.def("multiply", &multiply, nb::arg("x"), nb::arg("panels"), nb::arg("y"), nb::arg("isa"),
          nb::arg("threads"), nb::arg("repeats") = 1);
    m.def("read_bandwidth", &read_bandwidth, nb::arg("memory"), nb::arg("threads"),
          nb::arg("repeats") = 5);
}

}  // namespace cachewarm
