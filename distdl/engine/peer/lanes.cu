// How blocks of two devices wait for each other.

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
