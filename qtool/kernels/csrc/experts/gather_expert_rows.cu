// Copies tokens in 16 bits to rows that are sorted by expert: a token, or SiLU(gate) * up of it, goes to its row of each of its
// experts, rotated if ROTATE. A thread has eight values; the host defines CLUSTER, the number of blocks that share a row.
#include "activation/activation_row.cuh"

struct Params {
    Input in;
    Element* rows;     // [P, K]
    const int* place;  // [M, top] rows of the output, -1 for none; null: each token has its own row
    const int* end;    // the number of rows
    int k, top;
};

extern "C" __global__ void __launch_bounds__(THREADS) gather_expert_rows(const __grid_constant__ Params p) {
    grid_wait();
    grid_release();
    const u64 row = row_of_block();
    const int column = column_of(0);
    if (column >= p.k || (!p.place && row >= *p.end)) return;
    float y[1][8];
    load_row(y, p.in, row, p.k, 0.f, nullptr);
    const Eight values = narrow(y[0]);
    for (int i = 0; i < p.top; ++i)
        if (const int to = p.place ? p.place[row * p.top + i] : row; to >= 0)
            *reinterpret_cast<Eight*>(p.rows + static_cast<u64>(to) * p.k + column) = values;
}
