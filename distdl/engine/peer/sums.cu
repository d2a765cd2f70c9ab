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
    static __device__ float from(Half v) {
        float f;
        asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
        return f;
    }
    static __device__ float add(float a, float b) { return a + b; }
    static __device__ Half to(float f) {
        Half v;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v.bits) : "f"(f));
        return v;
    }
};
template <> struct Adding<Brain> {
    typedef float Wide;
    static __device__ float from(Brain v) { return __uint_as_float((u32)v.bits << 16); }
    static __device__ float add(float a, float b) { return a + b; }
    static __device__ Brain to(float f) {
        Brain v;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v.bits) : "f"(f));
        return v;
    }
};
template <> struct Adding<Truth> {  // "or", as in torch
    typedef unsigned char Wide;
    static __device__ Wide from(Truth v) { return v.value; }
    static __device__ Wide add(Wide a, Wide b) { return a > b ? a : b; }
    static __device__ Truth to(Wide v) { return {v}; }
};

struct Ends {  // of the lanes to and from one peer
    i64 peer, to_slots, freed, filled_there, sent, slots, filled, freed_there, received;
};

struct Sum {
    u64 fault, limit;
    char *x, *y;
    i64 total;  // words
    u32 name, per, lanes, count, me, pad;
    Ends peers[PEERS];  // in the order of the ranks
};

template <typename T, u32 V>
struct alignas(V * sizeof(T)) Word {
    T values[V];
};

// Every rank puts its numbers into the mailboxes of all others, and adds in the order of the ranks what it finds in its own.
template <typename T, u32 V>
__global__ void __launch_bounds__(THREADS, 2) sum_all(const __grid_constant__ Sum m) {
    typedef Word<T, V> W;
    typedef Adding<T> Add;
    __shared__ u32 sent[PEERS], received[PEERS];
    const u32 lane = blockIdx.x;
    for (u32 q = threadIdx.x; q < m.count; q += THREADS) {
        sent[q] = *(const u32*)(m.peers[q].sent + lane * LINE);
        received[q] = *(const u32*)(m.peers[q].received + lane * LINE);
    }
    u32 k = 0;
    for (i64 first = (i64)lane * m.per; first < m.total; first += (i64)m.lanes * m.per, ++k) {
        const u32 n = m.total - first < m.per ? m.total - first : m.per;
        const W* x = (const W*)m.x + first;
        W* y = (W*)m.y + first;
        for (u32 q = threadIdx.x; q < m.count; q += THREADS) await((const u32*)(m.peers[q].freed + lane * LINE), sent[q] + k + 1 - SLOTS, m, m.peers[q].peer);
        __syncthreads();
        for (u32 j = threadIdx.x; j < n; j += THREADS) {
            W v = x[j];
            for (u32 q = 0; q < m.count; ++q) {
                ((W*)(m.peers[q].to_slots + (i64)(lane * SLOTS + (sent[q] + k) % SLOTS) * CAPACITY))[j] = v;
            }
        }
        __syncthreads();
        for (u32 q = threadIdx.x; q < m.count; q += THREADS) {
            release((u32*)(m.peers[q].filled_there + lane * LINE), sent[q] + k + 1);
            await((const u32*)(m.peers[q].filled + lane * LINE), received[q] + k + 1, m, m.peers[q].peer);
        }
        __syncthreads();
        for (u32 j = threadIdx.x; j < n; j += THREADS) {
            typename Add::Wide sum[V];
            for (u32 q = 0; q <= m.count; ++q) {
                u32 other = q < m.me ? q : q - 1;
                const W* from = q == m.me ? x : (const W*)(m.peers[other].slots + (i64)(lane * SLOTS + (received[other] + k) % SLOTS) * CAPACITY);
                W v = q == m.me ? from[j] : fresh(from + j);
#pragma unroll
                for (u32 i = 0; i < V; ++i) sum[i] = q ? Add::add(sum[i], Add::from(v.values[i])) : Add::from(v.values[i]);
            }
            W v;
#pragma unroll
            for (u32 i = 0; i < V; ++i) v.values[i] = Add::to(sum[i]);
            y[j] = v;
        }
        __syncthreads();
        for (u32 q = threadIdx.x; q < m.count; q += THREADS) release((u32*)(m.peers[q].freed_there + lane * LINE), received[q] + k + 1);
    }
    for (u32 q = threadIdx.x; q < m.count; q += THREADS) {
        *(u32*)(m.peers[q].sent + lane * LINE) = sent[q] + k;
        *(u32*)(m.peers[q].received + lane * LINE) = received[q] + k;
    }
}
