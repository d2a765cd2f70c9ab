// Counters of lanes: how blocks of two devices wait for each other. Comes before boxes.cu and sums.cu.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

template <int N> struct Bits;
template <> struct Bits<1> { typedef unsigned char Type; };
template <> struct Bits<2> { typedef unsigned short Type; };
template <> struct Bits<4> { typedef u32 Type; };
template <> struct Bits<8> { typedef uint2 Type; };
template <> struct Bits<16> { typedef uint4 Type; };

__device__ __forceinline__ u32 acquire(const u32* a) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(a) : "memory");
    return v;
}
__device__ __forceinline__ void release(u32* a, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(a), "r"(v) : "memory");
}
// What a peer has written into a slot: never out of a cache that does not see it.
template <typename W>
__device__ __forceinline__ W fresh(const W* from) {
    typedef typename Bits<sizeof(W)>::Type B;
    B bits = __ldcg((const B*)from);
    return *(W*)&bits;
}
__device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// Nobody waits for ever: the host reads what it was, and the process ends.
template <typename M>
__device__ void give_up(const M& m, u32 peer) {
    *(volatile u64*)m.fault = (u64)m.name << 32 | (peer + 1);
    __threadfence_system();
    __trap();
}

// Until the counter has come to `wanted`; both wrap round.
template <typename M>
__device__ void await(const u32* counter, u32 wanted, const M& m, u32 peer) {
    if ((int)(acquire(counter) - wanted) >= 0) return;
    u64 since = now();
    for (u32 n = 1; (int)(acquire(counter) - wanted) < 0; ++n) {
        if (n % 1024 == 0 && now() - since > m.limit) give_up(m, peer);
    }
}
