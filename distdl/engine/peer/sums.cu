// All-reduces of a few numbers.

struct Half { unsigned short bits; };
struct Brain { unsigned short bits; };
struct Truth { unsigned char value; };

template <typename T> struct Adding {  // in which type values are added up
    typedef T Wide;
    static __device__ Wide from(T v) { return v; }
    static __device__ Wide add(Wide a, Wide b) { return a + b; }
    static __device__ T to(Wide v) { return v; }
};
template <> struct Adding<Half> {
    typedef float Wide;
    static __device__ float from(Half v) { return float_of_half(v.bits); }
    static __device__ float add(float a, float b) { return a + b; }
    static __device__ Half to(float f) { return {half_of_float(f)}; }
};
template <> struct Adding<Brain> {
    typedef float Wide;
    static __device__ float from(Brain v) { return float_of_brain(v.bits); }
    static __device__ float add(float a, float b) { return a + b; }
    static __device__ Brain to(float f) { return {brain_of_float(f)}; }
};
template <> struct Adding<Truth> {  // "or", as in torch
    typedef unsigned char Wide;
    static __device__ Wide from(Truth v) { return v.value; }
    static __device__ Wide add(Wide a, Wide b) { return a > b ? a : b; }
    static __device__ Truth to(Wide v) { return {v}; }
};

struct Sum {
    u64 fault, limit;
    char *x, *y;
    i64 total;  // values
    u32 name, count, me, aligned;
    char *there[PEERS], *here[PEERS];  // pages with each other rank, in order
    u32 number[PEERS];                 // which sum of that pair this is
    u32 rank[PEERS];
};

template <typename T, u32 V>
union Word {
    T values[V];
    uint2 bits;
    __device__ Word() {}
};

// V values from number i on, of `total`; what is beyond is never looked at.
template <typename T, u32 V>
__device__ __forceinline__ Word<T, V> read(const Sum& m, i64 i) {
    Word<T, V> v;
    if (m.aligned && (i + 1) * V <= m.total) {
        v.bits = ((const uint2*)m.x)[i];
    } else {
        v.bits = uint2{0, 0};
#pragma unroll
        for (u32 k = 0; k < V; ++k) {
            if (i * V + k < m.total) v.values[k] = ((const T*)m.x)[i * V + k];
        }
    }
    return v;
}

// Every rank writes its numbers into the pages of all others, and adds in the order of the ranks what it finds in its own.
// Two pages are enough: who sees a number of one sum knows that its writer is through with the sum before it, and so has
// read what was in the other page.
template <typename T, u32 V>
__global__ void __launch_bounds__(THREADS, 1) sum_all(const __grid_constant__ Sum m) {
    typedef Adding<T> Add;
    const i64 total = (m.total + V - 1) / V, begin = blockIdx.x * (i64)THREADS + threadIdx.x, step = gridDim.x * (i64)THREADS;
    for (i64 i = begin; i < total; i += step) {
        Word<T, V> v = read<T, V>(m, i);
        for (u32 q = 0; q < m.count; ++q) put(m.there[q] + (m.number[q] & 1) * (i64)PAGE + i * 16, v.bits, m.number[q]);
    }
    for (i64 i = begin; i < total; i += step) {
        typename Add::Wide sum[V];
        for (u32 q = 0; q <= m.count; ++q) {
            Word<T, V> v;
            if (q == m.me) {
                v = read<T, V>(m, i);
            } else {
                const u32 other = q < m.me ? q : q - 1, number = m.number[other];
                const char* from = m.here[other] + (number & 1) * (i64)PAGE + i * 16;
                if (!get(from, v.bits, number)) {
                    u64 since = now();
                    for (u32 n = 1; !get(from, v.bits, number); ++n) {
                        if (n % 1024 == 0 && now() - since > m.limit) give_up(m, m.rank[other]);
                    }
                }
            }
#pragma unroll
            for (u32 k = 0; k < V; ++k) sum[k] = q ? Add::add(sum[k], Add::from(v.values[k])) : Add::from(v.values[k]);
        }
        Word<T, V> v;
#pragma unroll
        for (u32 k = 0; k < V; ++k) v.values[k] = Add::to(sum[k]);
        if (m.aligned && (i + 1) * V <= m.total) {
            ((uint2*)m.y)[i] = v.bits;
        } else {
#pragma unroll
            for (u32 k = 0; k < V; ++k) {
                if (i * V + k < m.total) ((T*)m.y)[i * V + k] = v.values[k];
            }
        }
    }
}
