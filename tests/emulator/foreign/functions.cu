// Plain C++: structs by value and returned, references into local memory, constant tables, a switch, recursion by
// hand with a stack. Compiled with -G, so nothing is inlined, everything lives in local memory and debug sections abound.

struct Vector { double x, y, z; };
struct Particle { Vector at; float mass; short tag; char name[3]; };
struct Matrix { float m[3][3]; };
struct Settings { int steps; Vector shift; unsigned char order[5]; };

__constant__ int weights[8] = {1, -2, 3, -4, 5, -6, 7, -8};
__device__ long long visits = 1000;

__device__ Vector cross(Vector a, Vector b) {
    return {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}

__device__ Matrix multiply(const Matrix a, const Matrix& b) {
    Matrix out = {};
    for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 3; ++j)
            for (int k = 0; k < 3; ++k) out.m[i][j] += a.m[i][k] * b.m[k][j];
    return out;
}

__device__ void insert(int* values, int& count, int value) {
    int at = count++;
    for (; at > 0 && values[at - 1] > value; --at) values[at] = values[at - 1];
    values[at] = value;
}

// Nodes of the complete binary tree below `root`, in order of a depth-first walk, summed with changing signs.
__device__ int walk(int root, int limit) {
    int stack[16], top = 0, sum = 0, sign = 1;
    stack[top++] = root;
    while (top > 0) {
        const int node = stack[--top];
        if (node > limit) continue;
        sum += sign * node;
        sign = -sign;
        stack[top++] = 2 * node + 1;
        stack[top++] = 2 * node;
    }
    return sum;
}

__device__ int choose(int kind, int value) {
    switch (kind) {
        case 0: return value + 7;
        case 1: return value * weights[value & 7];
        case 2: return ~value;
        case 3: return value << 3;
        default: return -1;
    }
}

__device__ Particle move(Particle p, Settings s) {
    for (int i = 0; i < s.steps; ++i) p.at = cross(p.at, s.shift);
    p.mass *= 0.5f;
    p.tag = static_cast<short>(p.tag - s.order[p.tag & 3]);
    p.name[1] = static_cast<char>(p.name[0] + p.name[2]);
    return p;
}

extern "C" __global__ void functions(Particle* particles, const int* in, int* out, Settings settings) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    particles[t] = move(particles[t], settings);
    Matrix power = {{{1, 1, 0}, {0, 1, 1}, {1, 0, 1}}};
    for (int i = 0; i < t % 4; ++i) power = multiply(power, power);
    int sorted[9], count = 0;
    for (int i = 0; i < 9; ++i) insert(sorted, count, in[(t + i * 5) & 63]);
    out[5 * t] = static_cast<int>(power.m[0][1] * 100 + power.m[2][0]);
    out[5 * t + 1] = sorted[4];
    out[5 * t + 2] = walk(1 + t % 5, 40 + t);
    out[5 * t + 3] = choose(t % 5, in[t]);
    out[5 * t + 4] = static_cast<int>(atomicAdd(reinterpret_cast<unsigned long long*>(&visits), 1ull) / 1000);
}
