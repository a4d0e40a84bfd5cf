// Included once for each instruction set, which has defined
//   CW_BYTES      bytes of a vector register
//   CW_BF16       1 = the CPU multiplies bf16 pairs by itself
//   CW_ROWS       rows of the largest GEMM tile
// GCC's vector extensions, which clang shares, make one source of all of them.

typedef float vf __attribute__((vector_size(CW_BYTES)));
typedef int32_t vi __attribute__((vector_size(CW_BYTES)));
typedef uint32_t vu __attribute__((vector_size(CW_BYTES)));
typedef float vf_unaligned __attribute__((vector_size(CW_BYTES), aligned(4), may_alias));
typedef uint32_t vu_unaligned __attribute__((vector_size(CW_BYTES), aligned(4), may_alias));

constexpr int kLanes = CW_BYTES / 4;
constexpr int kVectors = kPanel / kLanes;  // of a panel's outputs

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
inline void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }
inline vu load_words(const void* p) { return *reinterpret_cast<const vu_unaligned*>(p); }
inline void store_words(void* p, vu v) { *reinterpret_cast<vu_unaligned*>(p) = v; }
inline vf splat(float x) { return x - vf{}; }

inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
inline vf greater_of(vf a, vf b) { return a > b ? a : b; }

inline vi lane_numbers() {
    vi v;
    for (int i = 0; i < kLanes; i++) v[i] = i;
    return v;
}

// Lanes in a fixed order: quarters onto each other by halves, then the four that are left.
template <class Combine>
inline float reduce(vf v, Combine combine) {
    typedef float four __attribute__((vector_size(16)));
    four parts[CW_BYTES / 16];
    __builtin_memcpy(parts, &v, sizeof v);
#pragma GCC unroll 4
    for (int half = CW_BYTES / 32; half; half /= 2) {
#pragma GCC unroll 4
        for (int i = 0; i < half; i++) parts[i] = combine(parts[i], parts[i + half]);
    }
    const four last = parts[0];
    return combine(combine(last[0], last[2]), combine(last[1], last[3]));
}
inline float sum_of(vf v) {
    return reduce(v, [](auto a, auto b) { return a + b; });
}
inline float max_of(vf v) {
    return reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

// 2^x for x <= 127; below -126 it is 0. exp2(0) is 1 exactly, so rescaling by it changes nothing.
// Polynomial on [-0.5, 0.5] with a relative error below 4e-6.
inline vf exp2_of(vf x) {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const vf shifted = x + 12582912.0f;
    const vf f = x - (shifted - 12582912.0f);
    vf p = splat(0.0013333558f);
    p = p * f + 0.0096181291f;
    p = p * f + 0.0555041087f;
    p = p * f + 0.2402265069f;
    p = p * f + 0.6931471806f;
    p = p * f + 1.0f;
    return select(x > -126.0f, (vf)((vi)p + ((vi)shifted << 23)), vf{});
}
inline float exp2_of(float x) { return exp2_of(splat(x))[0]; }

// To bfloat16, to nearest even, in the low halves of words.
inline vu round_to_bf16(vf v) {
    const vu bits = (vu)v;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline uint32_t round_to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// What a GEMM's left operand is made of: bf16 where the CPU takes pairs of them, else float.
#if CW_BF16
typedef uint16_t operand;
inline void store_operand(operand* p, vf v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
#else
typedef float operand;
inline void store_operand(operand* p, vf v) { store(p, v); }
#endif
